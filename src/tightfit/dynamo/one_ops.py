"""Inner modules in which data decide sizes: each is one op of a graph that goes on around it."""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from tightfit.capture.opaque.mark import is_opaque, look_into, run_as_one_op
from tightfit.capture.origins import module_names

_LARGE_SHARE = 0.5
"""Of the parameters: run as one op, such a module would leave little to plan."""


class OneOps:
    """Decides which modules of a callable run as one op without being marked."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._ours: dict[Any, list[nn.Module]] = {}
        self._followed: set[Any] = set()

    def at(self, places: Sequence[tuple[str, int]]) -> Any:
        """Return the innermost forward that contains a call, if it may become one op.

        `places`: the file and line of each call, the outermost first.
        """
        forwards = self._forwards()
        for file, line in reversed(places):
            for forward, own in forwards.items():
                if _holds(forward.__code__, file, line):
                    return forward if self._may_be_one_op(forward, own) else None
        return None

    def decide(self, forward: Any, is_one_op: bool) -> None:
        """Note whether a forward is one op from now on; if not, it is followed for good."""
        if not is_one_op:
            self._followed.add(forward)
            return
        self._ours[forward] = self._forwards()[forward]
        run_as_one_op(self._ours[forward], self)

    def names(self) -> list[str]:
        """Return the names of the modules that run as one op."""
        ours = {module for modules in self._ours.values() for module in modules}
        return [name for name, module in module_names(self._modules).items() if module in ours]

    def follow_all_again(self) -> bool:
        """Follow all forwards that were decided to be one op; return whether there are any."""
        ours, self._ours = self._ours, {}
        self._followed |= ours.keys()
        for modules in ours.values():
            look_into(modules, self)
        return bool(ours)

    def _forwards(self) -> dict[Any, list[nn.Module]]:
        """Return the modules by the function of their class that they run."""
        found: defaultdict[Any, list[nn.Module]] = defaultdict(list)
        for top in self._modules.values():
            for module in top.modules():
                forward = getattr(type(module), "forward", None)
                if isinstance(getattr(forward, "__code__", None), types.CodeType):
                    found[forward].append(module)
        return found

    def _may_be_one_op(self, forward: Any, own: Sequence[nn.Module]) -> bool:
        if forward in self._followed or forward in self._ours:
            return False
        tops = list(self._modules.values())
        total = sum(p.numel() for top in tops for p in top.parameters())
        return all(
            not any(module is top for top in tops)
            and not is_opaque(module)
            and "forward" not in module.__dict__
            and sum(p.numel() for p in module.parameters()) < _LARGE_SHARE * total
            for module in own
        )


def _holds(code: types.CodeType, file: str, line: int) -> bool:
    if code.co_filename != file:
        return False
    lines = [each for _, _, each in code.co_lines() if each is not None]
    return code.co_firstlineno <= line <= max(lines, default=0)
