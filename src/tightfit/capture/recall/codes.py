"""Code that ran while a step was traced: told by what it does, found again in another process."""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

import msgspec
from torch import nn

from tightfit.capture.reads.executed import Executed, is_ours
from tightfit.capture.reads.places import content_of

__all__ = ["WRAPPERS", "KeptCode", "digest_of", "found_again", "kept_codes"]

WRAPPERS = (staticmethod, classmethod, type(functools.cache(int)))
"""Kinds of objects around a function that they name as ``__wrapped__``."""


class KeptCode(msgspec.Struct, frozen=True, array_like=True):
    """One piece of code.

    Parameters
    ----------
    module : str
        Whose globals it uses.
    name : str
        That of the function.
    digest : str
        Of what it does.
    """

    module: str
    name: str
    digest: str


@functools.lru_cache(maxsize=8192)
def digest_of(code: CodeType) -> str:
    """Return what tells code from other code; where it stands in a file does not matter."""
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
    if isinstance(value, CodeType):
        return digest_of(value)
    if isinstance(value, tuple):
        return tuple(map(_constant, value))
    if isinstance(value, frozenset):
        return sorted(map(repr, map(_constant, value)))
    return type(value).__name__, value


def kept_codes(executed: Executed) -> tuple[KeptCode, ...]:
    """Return the code of functions among what has run: what ran on an import ran once for all."""
    return tuple(
        _kept(code, held) for code, held in executed.codes if code.co_flags & inspect.CO_OPTIMIZED
    )


def found_again(
    kept: Sequence[KeptCode],
    function: Any,
    modules: Mapping[str, nn.Module],
    *,
    reads_environment: bool,
) -> Executed | None:
    """Return such code as it is in this process, with its globals; None if any is not there.

    Parameters
    ----------
    function, modules
        Those of the call: what their classes and attributes hold is looked through, too.
    """
    wanted = set(kept)
    names = {each.name for each in kept}
    found: dict[KeptCode, tuple[CodeType, Mapping[str, Any]]] = {}
    for code, held in _functions(_roots(kept, function, modules)):
        if code.co_name in names:
            this = _kept(code, held)
            if this in wanted:
                found.setdefault(this, (code, held))
    if len(found) < len(wanted):
        return None
    return Executed(tuple(found[each] for each in kept), (), reads_environment)


def _kept(code: CodeType, held: Mapping[str, Any]) -> KeptCode:
    return KeptCode(str(held.get("__name__")), code.co_name, digest_of(code))


def _roots(
    kept: Sequence[KeptCode], function: Any, modules: Mapping[str, nn.Module]
) -> Iterator[Any]:
    yield function
    for module in (module for top in modules.values() for module in top.modules()):
        yield type(module)
        for value in module.__dict__.values():
            if isinstance(value, dict):
                yield from value.values()  # hooks
            else:
                yield value
    for name in dict.fromkeys(each.module for each in kept):
        loaded = sys.modules.get(name)
        if loaded is not None:
            yield from list(vars(loaded).values())


def _functions(roots: Iterable[Any]) -> Iterator[tuple[CodeType, Mapping[str, Any]]]:
    """Yield all code that some values lead to: methods, wrapped functions, functions within."""
    seen: set[int] = set()
    waiting = list(roots)[::-1]
    alive: list[Any] = []
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        inner = _within(value)
        if inner:
            alive.append(value)
            waiting.extend(inner)
        if isinstance(value, types.FunctionType):
            for code in _nested(value.__code__):
                yield code, value.__globals__


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _within(value: Any) -> list[Any]:
    """Return what a value is made of, as far as there can be functions in it."""
    if isinstance(value, types.FunctionType):
        cells = [content_of(cell) for cell in value.__closure__ or ()]
        return [*cells, *vars(value).values(), *(value.__defaults__ or ())]
    if isinstance(value, type):
        return [held for base in value.__mro__ for held in vars(base).values()]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, property):
        return [value.fget, value.fset]
    if isinstance(value, functools.partial | functools.partialmethod):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, functools.cached_property):
        return [value.func]
    if isinstance(value, WRAPPERS):
        return [value.__wrapped__]
    return [] if is_ours(type(value).__module__) else [type(value)]
