"""What graphs depend on and Dynamo does not guard: looked at in every call.

Settings of kernels, the hooks of all modules, the methods of classes, the environment.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Mapping
from typing import Any

from torch import nn

from tightfit.capture.reads.executed import is_library
from tightfit.torch_private import core as private
from tightfit.torch_private.settings import global_settings

__all__ = ["Unguarded"]


class Unguarded:
    """What Dynamo does not guard, for some modules.

    Parameters
    ----------
    modules : mapping of str to nn.Module
        Those that a callable uses.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._methods: tuple[tuple[type, str], ...] = ()
        self.look()

    def look(self) -> None:
        """Look which classes there are: code of theirs is followed now."""
        kinds = {type(m): None for top in self._modules.values() for m in top.modules()}
        homes = {kind.__module__: sys.modules.get(kind.__module__) for kind in kinds}
        own = [home for home in homes.values() if home and not is_library(_file_of(home))]
        beside = (x for home in own for x in vars(home).values() if isinstance(x, type))
        classes = {base: None for kind in (*kinds, *beside) for base in kind.__mro__}
        self._methods = tuple(
            (base, name)
            for base in classes
            if base not in nn.Module.__mro__ and not is_library(_file_of(base))
            for name, value in vars(base).items()
            if isinstance(value, _METHODS)
        )
        self._methods += tuple((kind, name) for kind in kinds for name in ("forward", "__call__"))

    def now(self) -> Any:
        """Return what graphs depend on, as it is now: another one asks for graphs of its own."""
        methods = tuple([vars(kind).get(name) for kind, name in self._methods])
        environment = frozenset(vars(os.environ)["_data"].items())
        codes = tuple(map(_code_of, methods))
        return global_settings(), private.caches_parametrizations(), methods, codes, environment


_METHODS = (types.FunctionType, staticmethod, classmethod, property)


def _code_of(method: Any) -> types.CodeType | None:
    return method.__code__ if type(method) is types.FunctionType else None


def _file_of(home: Any) -> str | None:
    module = sys.modules.get(getattr(home, "__module__", ""), home)
    return getattr(module, "__file__", None)
