"""What ran outside of every plan: by module and by reason, said once and kept for the report."""

from __future__ import annotations

import types
from collections.abc import Mapping

from torch import nn

from tightfit.allocator.tally import is_refusal
from tightfit.capture.origins import module_names
from tightfit.progress import announce

__all__ = ["Outside"]

_LONGEST = 200


class Outside:
    """Notes what is left to Python.

    Parameters
    ----------
    name : str
        Of the callable, for messages.
    modules : mapping of str to nn.Module
        Those that it uses.
    """

    def __init__(self, name: str, modules: Mapping[str, nn.Module]) -> None:
        self._name = name
        self._modules = modules
        self._reasons: dict[str, str] = {}

    @property
    def reasons(self) -> Mapping[str, str]:
        """Why something ran as plain Python, by what it was."""
        return self._reasons

    def skipped(
        self, code: types.CodeType, module: nn.Module | None, reason: str, error: Exception | None
    ) -> None:
        """Note a frame that Dynamo leaves alone, if it is the forward of a module.

        Raises
        ------
        RuntimeError
            If there was no room to look at it: it says nothing of the frame.
        """
        refusal = error
        while refusal is not None:
            if is_refusal(refusal):
                raise refusal
            refusal = refusal.__cause__ or refusal.__context__
        if module is None or code.co_name != "forward":
            return
        names = {each: name for name, each in module_names(self._modules).items()}
        name = names.get(module)
        if name is not None:
            self._note(f"module {name!r}" if name else "the outermost forward", reason)

    def left_out(self, name: str, error: Exception) -> nn.Module | None:
        """Note that no plan holds a module, so that it runs as plain Python; return it."""
        module = module_names(self._modules).get(name)
        if module is not None:
            self._note(f"module {name!r}", str(error))
        return module

    def broke(self, reason: str) -> None:
        """Note that a graph ends before the callable does."""
        self._note("what lies between two graphs", reason)

    def _note(self, what: str, reason: str) -> None:
        first = reason.strip().splitlines()[0][:_LONGEST]
        if self._reasons.setdefault(what, first) is not first:
            return
        announce(f"{self._name}: {what} runs eagerly, outside of every plan: {first}")
