"""Where operators come from: which module ran, and which region of autocast was open."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from tightfit.torch_private import core as private


def module_names(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the modules of a step and all inside them, by the names that messages use.

    `modules`: the outermost ones. Names begin with that of the outermost only where there are
    several.
    """
    alone = len(modules) == 1
    return {
        name if alone else f"{prefix}.{name}".rstrip("."): module
        for prefix, top in modules.items()
        for name, module in top.named_modules()
    }


@dataclass(frozen=True)
class BySequence:
    """Values that held while a step was traced, from which autograd sequence number on."""

    starts: tuple[int, ...]  # rising
    values: tuple[Any, ...]  # holding from each of them on

    def at(self, sequence: int | None, default: Any) -> Any:
        """Return the value at a number; the default for no number, or before the first."""
        position = -1 if sequence is None else bisect_right(self.starts, sequence) - 1
        return self.values[position] if position >= 0 else default


@dataclass(frozen=True)
class Origins:
    """Where each operator of a step comes from, by the autograd sequence number that it carries.

    Its backward carries the same number, and so does a replacement made later.
    """

    modules: BySequence  # the names of the modules that ran
    regions: BySequence  # the stretches in which autocast kept casts, numbered; None: it kept none

    def module_at(self, sequence: int | None) -> str:
        """Return the name of the module that was running at a number; "": the outermost."""
        return self.modules.at(sequence, "")

    def region_at(self, sequence: int | None) -> int | None:
        """Return the region of autocast at a number; None: casts were not kept there."""
        return self.regions.at(sequence, None)


class ModuleTrail:
    """Follows module calls while a step is traced.

    Autograd numbers the nodes it makes; every traced operator carries that number, and so does its
    backward. The trail notes which module was running from which number on: so both find it.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._names: dict[nn.Module, str] = {}
        for name, module in module_names(modules).items():
            self._names.setdefault(module, name)
        self._stack: list[str] = []
        self._starts: list[int] = []
        self._running: list[str] = []
        self._handles: list[Any] = []
        self._last = ""
        self._noted: str | None = None  # of a handed graph, where no module is called

    def __enter__(self) -> ModuleTrail:
        _FOLLOWING.append(self)
        self._handles = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ]
        return self

    def __exit__(self, *_: Any) -> None:
        _FOLLOWING.remove(self)
        for handle in self._handles:
            handle.remove()

    def resume_module(self, name: str) -> None:
        """Note that later ops belong to a module, whose forward is no call here."""
        if not self._running or self._running[-1] != name:
            self._note(name, push=False)
            self._noted = name

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

    @property
    def running(self) -> str:
        """The name of the module that is running; "": the outermost."""
        return self._stack[-1] if self._stack else ""

    def names(self) -> BySequence:
        """Return which module was running from which number on."""
        return BySequence(tuple(self._starts), tuple(self._running))

    def culprit(self, error: BaseException) -> str | None:
        """Return the innermost module in whose forward an error was raised; "": the outermost."""
        found = self._noted
        traceback = error.__traceback__
        while traceback is not None:
            module = traceback.tb_frame.f_locals.get("self")
            if isinstance(module, nn.Module) and module in self._names:
                found = self._names[module]
            traceback = traceback.tb_next
        return found

    def where(self, error: BaseException) -> str:
        """Say in which module an error was raised, for an error message."""
        inner = self.culprit(error)
        if inner:
            return f"module {inner!r}"
        return f"the call, after module {self._last!r}," if self._last else "the call"


_FOLLOWING: list[ModuleTrail] = []
"""Those that follow a trace now."""


def note_module(name: str) -> None:
    """Note that ops traced from now on were made in a module, by its name."""
    for trail in _FOLLOWING:
        trail.resume_module(name)


class CastRegions:
    """Follows autocast while a step is traced.

    Eager keeps the casts of weights until the outermost autocast ends. A region is a stretch
    between two such ends in which casts are kept; operators are placed in it by the number of
    autograd that they carry.
    """

    def __init__(self) -> None:
        self._keeps = torch.is_autocast_cache_enabled()
        self._starts: list[int] = []
        self._regions: list[int | None] = []
        self._region = 0
        self._watched: Any = None

    def __enter__(self) -> CastRegions:
        self._watched = private.watched_autocast(self._changed)
        self._watched.__enter__()
        self._note(self._keeps)
        return self

    def __exit__(self, *_: Any) -> None:
        self._watched.__exit__(None, None, None)

    def _changed(self) -> None:
        if private.autocast_nesting() == 0:
            self._region += 1
        self._note(torch.is_autocast_cache_enabled())

    def _note(self, keeps: bool) -> None:
        self._starts.append(private.sequence_number())
        self._regions.append(self._region if keeps and private.autocast_dtypes() else None)

    def regions(self) -> BySequence:
        """Return which region was open from which number on; None where casts were not kept."""
        return BySequence(tuple(self._starts), tuple(self._regions))
