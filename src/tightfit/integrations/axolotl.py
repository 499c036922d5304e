"""A plugin for axolotl: ``plugins: [tightfit.integrations.axolotl.TightfitPlugin]``.

Next to it in the same file: ``memory_budget: 8GiB``. The trainer's model is fitted as by the
callback for Hugging Face's Trainer, which axolotl's is. Tested with axolotl's own class; a whole
run of axolotl needs a GPU and was not tried.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from tightfit.errors import BadInput, MissingExtra
from tightfit.integrations.hugging_face import Budget

try:
    from axolotl.integrations.base import BasePlugin
except ModuleNotFoundError as error:
    raise MissingExtra(
        f"this plugin needs axolotl and {error.name}: pip install axolotl"
    ) from error

__all__ = ["MemoryBudgetArgs", "TightfitPlugin"]


class MemoryBudgetArgs(BaseModel):
    """Settings of a configuration that the plugin reads."""

    memory_budget: int | str | None = None


class TightfitPlugin(BasePlugin):
    """Fit the model that axolotl trains inside ``memory_budget``."""

    def get_input_args(self) -> str:
        """Return where the plugin's part of the configuration is described."""
        return f"{__name__}.MemoryBudgetArgs"

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        """Return the callback that fits the model when the trainer is made.

        Raises
        ------
        BadInput
            If the plugin is named and no budget is.
        """
        if not cfg.memory_budget:
            raise BadInput("TightfitPlugin needs a line memory_budget, such as memory_budget: 8GiB")
        return [Budget(cfg.memory_budget)]
