"""Guards that Dynamo does not install: checked in every call.

Settings of kernels, the hooks of all modules, the methods of classes and of tensors, the
environment.
"""

from __future__ import annotations

import gc
import os
import sys
import types
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from tightfit.capture.libraries import is_library
from tightfit.torch_private import core as private
from tightfit.torch_private.dynamo import dict_version
from tightfit.torch_private.settings import choices_of_kernels, hooks_of_all_modules

_Place = tuple[Any, Any]


class Unguarded:
    """Values that Dynamo does not guard, for some modules."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._methods: tuple[tuple[type, str], ...] = ()
        self._dictionaries: tuple[Any, ...] = ()
        self._functions: tuple[types.FunctionType, ...] = ()
        self._last: Any = None
        self._number = -1
        self._known: list[dict[_Place, Any]] = []
        self.look()

    def look(self) -> None:
        """Look which classes there are: code of theirs is followed now."""
        kinds = {type(m): None for top in self._modules.values() for m in top.modules()}
        homes = {kind.__module__: sys.modules.get(kind.__module__) for kind in kinds}
        own = [home for home in homes.values() if home and not is_library(_file_of(home))]
        others = (x for home in own for x in vars(home).values() if isinstance(x, type))
        classes = {base: None for kind in (*kinds, *others) for base in kind.__mro__}
        methods = [
            *self._methods,
            *((kind, name) for kind in kinds for name in ("forward", "__call__")),
        ]
        methods += [
            (base, name)
            for base in classes
            if base not in nn.Module.__mro__ and not is_library(_file_of(base))
            for name, value in vars(base).items()
            if isinstance(value, _METHODS)
        ]
        self._methods = tuple(dict.fromkeys(methods))
        owners = (*dict.fromkeys(owner for owner, _ in self._methods), torch.Tensor)
        dictionaries = (gc.get_referents(vars(owner))[0] for owner in owners)  # `vars`: views
        self._dictionaries = (_ENVIRONMENT, *hooks_of_all_modules(), *dictionaries)
        self._last = None  # look closely in the next call

    def now(self) -> int:
        """Return a number for values that graphs depend on: each number has graphs of its own."""
        seen = (
            [*map(dict_version, self._dictionaries)],
            [*map(_code_of, self._functions)],
            choices_of_kernels(),
            private.caches_parametrizations(),
        )
        if seen != self._last:
            self._number = self._numbered(self._state())
            seen[1][:] = map(_code_of, self._functions)
            self._last = seen
        return self._number

    def _state(self) -> dict[_Place, Any]:
        """Return values that graphs depend on, by their places."""
        state: dict[_Place, Any] = {("choices", ""): choices_of_kernels()}
        state["parametrizations", ""] = private.caches_parametrizations()
        state["environment", ""] = dict(_ENVIRONMENT)
        state["methods of tensors", ""] = dict(vars(torch.Tensor))
        for number, hooks in enumerate(hooks_of_all_modules()):
            state["hooks", number] = tuple(hooks.values())
        held = {(kind, name): vars(kind).get(name) for kind, name in self._methods}
        functions = {place: f for place, f in held.items() if type(f) is types.FunctionType}
        self._functions = tuple(functions.values())
        codes = zip(self._functions, map(_code_of, self._functions), strict=True)
        return state | held | dict(zip(functions, codes, strict=True))

    def _numbered(self, state: dict[_Place, Any]) -> int:
        """Return the number of a state; a value not looked at before counts as unchanged."""
        for number, known in enumerate(self._known):
            if all(state[place] == known[place] for place in known.keys() & state):
                known.update(state)
                return number
        self._known.append(state)
        return len(self._known) - 1


_METHODS = (types.FunctionType, staticmethod, classmethod, property)
_ENVIRONMENT: dict[Any, Any] = vars(os.environ)["_data"]
_code_of = attrgetter("__code__")


def _file_of(home: Any) -> str | None:
    module = sys.modules.get(getattr(home, "__module__", ""), home)
    return getattr(module, "__file__", None)
