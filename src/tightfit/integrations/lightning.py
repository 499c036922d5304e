"""A callback for Lightning: ``Trainer(callbacks=[Budget("8GiB")])``."""

from __future__ import annotations

from typing import Any

from torch import nn

from tightfit.api.fit import fit, report
from tightfit.errors import BadInput, MissingExtra
from tightfit.progress import announce

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError as error:
    raise MissingExtra("this callback needs Lightning: pip install tightfit[lightning]") from error

__all__ = ["Budget"]


class Budget(Callback):
    """Fit the model of a LightningModule inside a budget; log its measured peak in bytes.

    Parameters
    ----------
    budget : int or str
        Bytes, or text such as ``"8GiB"``.
    module : str, optional
        The attribute that ``training_step`` calls; by default the only child with parameters, or
        the LightningModule itself where there are several.
    **keywords
        As `tightfit.fit` takes them.
    """

    def __init__(self, budget: int | str, module: str | None = None, **keywords: Any) -> None:
        self._budget = budget
        self._name = module
        self._keywords = keywords
        self._model: nn.Module | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Fit the model before it is trained; once."""
        if stage == "fit" and self._model is None:
            self._model = fit(self._chosen(pl_module), self._budget, **self._keywords)
            announce(f"{type(self._model).__name__} trains within {self._budget} (Lightning)")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Log the bytes that the last step held."""
        assert self._model is not None
        measured = report(self._model).measured_peak_bytes
        if measured is not None:
            pl_module.log("measured_peak_bytes", float(measured))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Announce the report of the model."""
        assert self._model is not None
        announce(str(report(self._model)).replace("\n", "; "))

    def _chosen(self, pl_module: nn.Module) -> nn.Module:
        children = dict(pl_module.named_children())
        if self._name is not None:
            if self._name not in children:
                known = ", ".join(children) or "none"
                raise BadInput(f"there is no module {self._name!r} in the model (known: {known})")
            return children[self._name]
        trained = [child for child in children.values() if any(True for _ in child.parameters())]
        return trained[0] if len(trained) == 1 else pl_module
