"""A callback for the Trainer of Hugging Face: ``Trainer(..., callbacks=[Budget("8GiB")])``."""

from __future__ import annotations

from typing import Any

from tightfit.api.fit import fit, report
from tightfit.errors import BadInput, MissingExtra
from tightfit.progress import announce
from tightfit.units import format_bytes

try:
    from transformers import TrainerCallback
except ModuleNotFoundError as error:
    raise MissingExtra("this callback needs transformers: pip install tightfit[hf]") from error

__all__ = ["Budget"]


class Budget(TrainerCallback):
    """Fit the trainer's model inside a budget; log its planned and measured peak in bytes.

    Parameters
    ----------
    budget : int or str
        Bytes, or text such as ``"8GiB"``.
    **keywords
        As `tightfit.fit` takes them.
    """

    def __init__(self, budget: int | str, **keywords: Any) -> None:
        self._budget = budget
        self._keywords = keywords
        self._model: Any = None

    def on_init_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        """Fit the model, before anything is wrapped around it."""
        fit(model, self._budget, **self._keywords)
        self._model = model
        announce(f"{type(model).__name__} trains within {self._budget} (Trainer)")

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Refuse to train a model that was not fitted.

        Raises
        ------
        BadInput
            If the callback was added after the trainer had been made.
        """
        if self._model is None:
            raise BadInput(
                "the budget came too late: the trainer has its model wrapped already. Give the "
                "callback to Trainer(..., callbacks=[...]), not to add_callback"
            )

    def on_log(self, args: Any, state: Any, control: Any, *, logs: Any, **_: Any) -> None:
        """Add planned and measured bytes to the log."""
        if state.global_step == 0:
            return
        known = report(self._model)
        peaks = {
            "planned_peak_bytes": known.planned_peak_bytes,
            "measured_peak_bytes": known.measured_peak_bytes,
        }
        for record in (logs, state.log_history[-1] if state.log_history else {}):
            record.update({name: size for name, size in peaks.items() if size is not None})

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Announce the bytes that the last step held."""
        measured = report(self._model).measured_peak_bytes
        if measured is not None:
            announce(f"the last step held {format_bytes(measured)} of {self._budget}")
