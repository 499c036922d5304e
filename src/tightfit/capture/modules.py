"""Which module runs when: names for operators and for errors."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from tightfit.capture import _torch as private

__all__ = ["ModuleTrail"]


class ModuleTrail:
    """Follows module calls while a step is traced.

    Autograd numbers the nodes it makes; every traced operator carries that number. The trail
    notes which module was running from which number on, so that an operator (and its backward,
    which carries the same number) finds its module.
    """

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self._names: dict[nn.Module, str] = {}
        alone = len(modules) == 1
        for prefix, root in modules.items():
            for name, module in root.named_modules():
                parts = (name,) if alone else (prefix, name)
                self._names.setdefault(module, ".".join(p for p in parts if p))
        self._stack: list[str] = []
        self._starts: list[int] = []
        self._running: list[str] = []
        self._handles: list[Any] = []
        self._last = ""

    def __enter__(self) -> ModuleTrail:
        self._handles = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ]
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter_module(self, module: nn.Module, _args: Any) -> None:
        self._note(self._names.get(module, ""), push=True)

    def _leave_module(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if self._stack:
            self._stack.pop()
        self._note(self._stack[-1] if self._stack else "", push=False)

    def _note(self, name: str, *, push: bool) -> None:
        if push:
            self._stack.append(name)
            self._last = name
        self._starts.append(private.sequence_number())
        self._running.append(name)

    def module_at(self, sequence: int | None) -> str:
        """Return the name of the module that was running at an autograd sequence number."""
        if sequence is None:
            return ""
        position = bisect_right(self._starts, sequence) - 1
        return self._running[position] if position >= 0 else ""

    def where(self) -> str:
        """Return the module that ran last, for an error message."""
        return f"module {self._last!r}" if self._last else "the call"
