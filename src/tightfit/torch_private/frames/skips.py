"""Frames that run as plain Python, remembered by module and callable. Private names of torch.

Dynamo marks the code of a frame that it leaves to Python, and never looks at that code again. But
modules of one class share their code, which may be followed in another of them: before PyTorch 2.13
in another callable, and on all releases in another part of the same.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterable
from itertools import filterfalse
from typing import Any

from torch import nn
from torch._dynamo import trace_rules
from torch._dynamo.eval_frame import set_code_exec_strategy
from torch._dynamo.types import ConvertFrameReturn, FrameAction, FrameExecStrategy

from tightfit.torch_private.frames.of_modules import is_forward_of_pytorch

_LOOKED_AT = FrameExecStrategy(FrameAction.DEFAULT, FrameAction.DEFAULT)


class Skips:
    """Remembers which frames of one callable run as plain Python, in place of marks.

    Marks that others have made, as `torch.compile` does, are undone for code of the callable.
    """

    def __init__(self) -> None:
        self._by_module = weakref.WeakKeyDictionary[
            nn.Module, dict[types.CodeType, ConvertFrameReturn]
        ]()
        self._by_code: dict[types.CodeType, ConvertFrameReturn] = {}  # of all modules, or of none
        self._codes: frozenset[types.CodeType] = frozenset()

    def find(self, code: types.CodeType, module: nn.Module | None) -> ConvertFrameReturn | None:
        """Return the result for a frame that runs as plain Python from now on."""
        known = {} if module is None else self._by_module.get(module, {})
        return known.get(code) or self._by_code.get(code)

    def kept(
        self, code: types.CodeType, module: nn.Module | None, result: ConvertFrameReturn
    ) -> ConvertFrameReturn:
        """Return Dynamo's result for a frame; where it marks the code, it is kept here instead."""
        if result.guarded_code is not None or not result.apply_to_code:
            return result
        if _stays_marked(code):
            return result
        result.apply_to_code = False
        known = self._by_code if module is None else self._by_module.setdefault(module, {})
        known[code] = result
        return result

    def undo_from_now_on(self, codes: Iterable[types.CodeType]) -> None:
        """Have frames of code looked at, whoever marks it; not in files that stay marked."""
        self._codes |= set(filterfalse(_stays_marked, codes))
        self.undo_marks()

    def undo_marks(self) -> Any:
        """Undo the marks of code of this callable; return what is to be done after its call."""
        for code in self._codes:
            set_code_exec_strategy(code, _LOOKED_AT)
        return _nothing


def _stays_marked(code: types.CodeType) -> bool:
    """Whether code is in a file that Dynamo never follows: the module does not matter there."""
    return trace_rules.check(code) and not is_forward_of_pytorch(code)


def _nothing() -> None:
    """Do nothing."""
