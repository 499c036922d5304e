"""Tokens that describe values, so that another process can compare them with its own.

A token is only ever compared with another token: nothing is looked up by it.
"""

from __future__ import annotations

import functools
import hashlib
import os
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from tightfit.capture.libraries import is_library
from tightfit.capture.recall.values import NotKept, packed

_WRAPPERS = (staticmethod, classmethod, type(functools.cache(int)))
_CALLERS = (functools.partial, functools.partialmethod, functools.cached_property)
_BUILTINS = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.GetSetDescriptorType,
)
_MARKS = ("_dynamo_", "_torchdynamo_")
_KNOWN = ("torch", "builtins")
_DEEPEST = 4  # levels of functions inside closures of functions


class Tokens:
    """Makes tokens of values; remembers the code that it has met on the way."""

    def __init__(self) -> None:
        self._codes: set[types.CodeType] = set()
        self._classes: dict[type, str] = {}

    def of(self, value: Any) -> Any:
        """Return the token of a value.

        Raises `NotKept` if nothing tells it from other values.
        """
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.CodeType):
            return self._code(value)
        if isinstance(value, types.ModuleType):
            return ["Python module", value.__name__]
        if isinstance(value, _BUILTINS):
            owner = getattr(value, "__objclass__", None)
            return ["builtin", getattr(value, "__module__", None), value.__qualname__, str(owner)]
        if isinstance(value, types.MethodType):
            return ["method", self.of(value.__func__)]
        if type(value) in (tuple, list):
            return [type(value).__name__, *map(self.of, value)]
        if isinstance(value, nn.Module):
            raise NotKept("a guard on which module it is")
        return packed(value)

    def cover(self, traced: Sequence[types.CodeType]) -> None:
        """Make sure that the tokens so far describe all that was followed.

        Raises `NotKept` if it is not: code that no class and no guard leads to, or that reads the
        environment.
        """
        for code in traced:
            if code.co_filename == os.getenv.__code__.co_filename:
                raise NotKept("code that asks the operating system")
            if not is_library(code.co_filename) and code not in self._codes:
                raise NotKept(f"{code.co_name}, to which nothing leads that is guarded")

    def _code(self, code: types.CodeType) -> list[Any]:
        if code not in self._codes:
            self._codes.update(_nested(code))
        if is_library(code.co_filename):
            return ["code", code.co_filename, code.co_firstlineno, code.co_name]
        return ["code", digest_of(code)]

    def _function(self, function: types.FunctionType, depth: int = 0) -> list[Any]:
        """Return the token of a function: its code, defaults, and functions that it closes over."""
        if not is_library(function.__code__.co_filename):
            marks = [name for name in vars(function) if name.startswith(_MARKS)]
            if marks:
                raise NotKept(
                    f"{function.__qualname__}, which Dynamo treats by its mark {marks[0]}"
                )
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        cells = [_content(cell) for cell in function.__closure__ or ()]
        around = [self._attached(each, depth + 1) for each in (*defaults, *cells)]
        return [*self._code(function.__code__), function.__module__, *around]

    def _attached(self, value: Any, depth: int) -> Any:
        """Return the token of a default or closed-over value; of objects only their kind."""
        if isinstance(value, types.FunctionType) and depth < _DEEPEST:
            return self._function(value, depth)
        if isinstance(value, type):
            return self._class(value)
        try:
            return packed(value)
        except NotKept:
            return f"{type(value).__module__}.{type(value).__qualname__}"

    def _class(self, kind: type) -> list[Any]:
        """Return the token of a class: its name, and the methods of all its bases.

        Attributes of a metaclass that Dynamo reads have no guard, so the token includes them.
        """
        if kind not in self._classes:
            self._classes[kind] = ""  # methods may close over their class
            kinds = [base for base in kind.__mro__ if base is not object]
            kinds_of = [base for base in type(kind).__mro__ if base not in (type, object)]
            parts = [
                (base.__module__, base.__qualname__, [*self._methods(base)])
                for base in (*kinds, *kinds_of)
            ]
            parts += [(name, self._attached(v, 0)) for b in kinds_of for name, v in vars(b).items()]
            self._classes[kind] = hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()
        return ["class", kind.__module__, kind.__qualname__, self._classes[kind]]

    def _methods(self, base: type) -> Iterator[Any]:
        """Yield the methods of a class; none of PyTorch's, see `traces.patched`."""
        if base.__module__.partition(".")[0] in _KNOWN:
            return
        for name, value in vars(base).items():
            for held in _functions_of(value):
                yield name, self._function(held)


def _functions_of(value: Any) -> list[types.FunctionType]:
    """Return the functions behind an attribute of a class."""
    if isinstance(value, types.FunctionType):
        return [value]
    if isinstance(value, property):
        return [f for f in (value.fget, value.fset) if isinstance(f, types.FunctionType)]
    if isinstance(value, _WRAPPERS):
        return _functions_of(value.__wrapped__)
    return _functions_of(value.func) if isinstance(value, _CALLERS) else []


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


def files_of(traced: Sequence[types.CodeType]) -> list[Any]:
    """Return the size and the date of the files that installed code was followed in."""
    names = sorted({code.co_filename for code in traced if is_library(code.co_filename)})
    found = [(name, Path(name).stat()) for name in names if not name.startswith("<")]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in found]


@functools.lru_cache(maxsize=8192)
def digest_of(code: types.CodeType) -> str:
    """Return a value that tells code from other code; its place in a file does not matter."""
    parts = (
        code.co_name,
        code.co_flags,
        (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount),
        (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars),
        code.co_code,
        getattr(code, "co_exceptiontable", b""),
        tuple(map(_constant, code.co_consts)),
    )
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()


def _constant(value: Any) -> Any:
    if isinstance(value, types.CodeType):
        return digest_of(value)
    if isinstance(value, tuple):
        return tuple(map(_constant, value))
    if isinstance(value, frozenset):
        return sorted(map(repr, map(_constant, value)))
    return type(value).__name__, value
