"""Options that every command on models shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tightfit.errors import BadInput

__all__ = ["DEFAULT_MODEL_OPTIONS", "ModelOptions", "is_model", "require_model"]


@dataclass(frozen=True)
class ModelOptions:
    """What a model is made with.

    Parameters
    ----------
    batch
        Examples per batch; passed to the factory.
    size
        Image size in pixels, such as 224 or 416x608 (height x width); zoo models.
    sequence
        Tokens per text; zoo models.
    dropout
        Dropout probability; zoo models.
    setting
        Sizes of a paper by name, such as monet or checkmate; zoo models.
    """

    batch: int | None = None
    size: str | None = None
    sequence: int | None = None
    dropout: float | None = None
    setting: str | None = None

    def keywords(self) -> dict[str, Any]:
        """Return the options as `tightfit.studies.model.load_example` takes them."""
        return {
            "batch": self.batch,
            "size": None if self.size is None else _size(self.size),
            "sequence": self.sequence,
            "dropout": self.dropout,
            "setting": self.setting,
        }

    @property
    def given(self) -> list[str]:
        """The names of the options that are given."""
        return [name for name, value in vars(self).items() if value is not None]


DEFAULT_MODEL_OPTIONS = ModelOptions()


def is_model(target: str) -> bool:
    """Whether a command's first argument names a model rather than a file."""
    return ":" in target and not target.endswith((".json", ".json.gz"))


def require_model(target: str, otherwise: str) -> None:
    """Refuse what names no model.

    Parameters
    ----------
    otherwise : str
        What to say of a graph file.

    Raises
    ------
    BadInput
        If it names none.
    """
    if not is_model(target):
        raise BadInput(
            f"{target!r} names no model: write zoo:NAME, package.module:factory or "
            f"path/to/file.py:factory ({otherwise})"
        )


def _size(text: str) -> int | tuple[int, int]:
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.isdecimal() for part in parts):
        raise BadInput(f"cannot read the size {text!r}: write 224 or 416x608 (height x width)")
    numbers = [int(part) for part in parts]
    return numbers[0] if len(numbers) == 1 else (numbers[0], numbers[1])
