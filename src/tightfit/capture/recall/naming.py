"""Names of what code can read: where they are the same in another process, so is what they name."""

from __future__ import annotations

import argparse
import array
import collections
import contextvars
import datetime
import decimal
import enum
import fractions
import functools
import hashlib
import inspect
import logging
import pathlib
import re
import threading
import types
import typing
import uuid
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch
from torch import nn

from tightfit.capture.calls.attributes import Identity
from tightfit.capture.calls.structure import PLAIN
from tightfit.capture.origins import module_names
from tightfit.capture.reads.executed import is_ours
from tightfit.capture.reads.places import MISSING, content_of
from tightfit.capture.recall.codes import WRAPPERS, digest_of
from tightfit.capture.recall.values import bytes_of
from tightfit.torch_private import core as private
from tightfit.torch_private.traces import DecoratingContext, children_of_tree

__all__ = ["Naming", "NotNamed"]

_LARGEST_BYTES = 1 << 20  # of numbers that are compared
_BY_TEXT = (
    torch.dtype,
    torch.device,
    torch.memory_format,
    torch.layout,
    torch.finfo,
    torch.iinfo,
    numpy.dtype,
    numpy.generic,
    numpy.ufunc,
    range,
    pathlib.PurePath,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    decimal.Decimal,
    fractions.Fraction,
    uuid.UUID,
    inspect.Signature,
    inspect.Parameter,
    types.GenericAlias,
    types.UnionType,
    typing.TypeVar,
    type(typing.Any),
    type(typing.Optional[int]),  # noqa: UP045
    type(Ellipsis),
    type(NotImplemented),
    private.OpOverload,
    private.OpOverloadPacket,
)
"""What is told by how it prints itself, and by its class."""
_BY_PLACE = (
    list,
    dict,
    set,
    collections.deque,
    bytearray,
    array.array,
    types.MappingProxyType,
    weakref.WeakKeyDictionary,
    weakref.WeakValueDictionary,
    weakref.WeakSet,
    threading.local,
    types.SimpleNamespace,
    argparse.Namespace,
    collections.OrderedDict,
    object,
    type(threading.Lock()),
    type(threading.RLock()),
)
"""What is told by which of them it is; what it holds lies in places of its own."""
_BUILTINS = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)
_POINTER_BYTES = 8


class NotNamed(Exception):
    """Something has no name that would mean the same in another process."""


class Naming:
    """Names values. An object without contents of its own is told by when it was first met.

    Parameters
    ----------
    modules : mapping of str to nn.Module
        Those of a call, which are named by their places, as their tensors are.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._places: dict[int, str] = {}
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []
        self._named: set[int] = set()  # functions of PyTorch and Python around others, by id
        for name, module in module_names(modules).items():
            self._places.setdefault(id(module), f"module {name}")
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                self._places.setdefault(id(tensor), f"tensor {name}.{key}")

    def of(self, value: Any) -> str:
        """Return the name of a value.

        Raises
        ------
        NotNamed
            If it has none.
        """
        kind = type(value)
        if kind in _PRINTED:
            return f"{kind.__name__} {value!r}"
        if value is MISSING:
            return "nothing"
        for classes, name in _NAMED_BY:
            if isinstance(value, classes):
                return name(self, value)
        return self._object(value)

    def numbered(self, value: Any) -> str:
        """Return the number of an object, by when it was first met."""
        number = self._numbers.setdefault(id(value), len(self._numbers))
        self._alive.append(value)
        return f"#{number}"

    def all_of(self, values: Any) -> str:
        """Return the names of several values."""
        return f"({', '.join(map(self.of, values))})"

    # -- kinds of values ----------------------------------------------------------------------

    def _identity(self, value: Identity) -> str:
        return self.of(value.value)

    def _enum(self, value: enum.Enum) -> str:
        return f"{_class(type(value))}.{value.name} {value.value!r}"

    def _plain(self, value: Any) -> str:
        bases = (b for b in type(value).__mro__ if b in _PRINTED)
        base = next(bases, None)
        text = repr(value) if base is None else base.__repr__(value)
        return f"{_class(type(value))} {text}"

    def _text(self, value: Any) -> str:
        return f"{_class(type(value))} {value!s}"

    def _tuple(self, value: tuple[Any, ...]) -> str:
        return f"{_class(type(value))} {self.all_of(value)}"

    def _frozenset(self, value: frozenset[Any]) -> str:
        return f"{_class(type(value))} {sorted(map(self.of, value))}"

    def _slice(self, value: slice) -> str:
        return f"slice {self.all_of((value.start, value.stop, value.step))}"

    def _function(self, value: types.FunctionType) -> str:
        module = value.__globals__.get("__name__")
        name = f"function {self.numbered(value)} of {module} {digest_of(value.__code__)}"
        if not value.__closure__ or not is_ours(module) or id(value) in self._named:
            return name  # what a user's function closes over is compared by itself
        self._named.add(id(value))
        return f"{name} around {[self._held(cell) for cell in value.__closure__]}"

    def _held(self, cell: types.CellType) -> str:
        """Return the name of what a function of PyTorch or Python has closed over."""
        content = _content(cell)
        try:
            return self.of(content)
        except NotNamed:
            if isinstance(content, tuple | torch.Tensor) or not is_ours(type(content).__module__):
                raise
            return _class(type(content))  # its own, such as what `torch.compiler.disable` keeps

    def _context(self, value: Any) -> str:
        return f"{_class(type(value))} {self.all_of(vars(value).items())}"

    def _builtin(self, value: Any) -> str:
        owner = getattr(value, "__self__", None)
        name = f"builtin {getattr(value, '__module__', None)} {value.__qualname__}"
        if owner is None or isinstance(owner, types.ModuleType):
            return f"{name} {_class(getattr(value, '__objclass__', type(None)))}"
        return f"{name} of {self.of(owner)}"

    def _method(self, value: types.MethodType) -> str:
        return f"method {self.all_of((value.__func__, value.__self__))}"

    def _partial(self, value: Any) -> str:
        keywords = tuple(value.keywords.items())
        return f"{_class(type(value))} {self.all_of((value.func, value.args, keywords))}"

    def _property(self, value: property) -> str:
        return f"property {self.all_of((value.fget, value.fset, value.fdel))}"

    def _cached_property(self, value: Any) -> str:
        return f"cached property {self.of(value.func)}"

    def _wrapped(self, value: Any) -> str:
        return f"{_class(type(value))} {self.of(value.__wrapped__)}"

    def _reference(self, value: weakref.ref[Any]) -> str:
        return f"reference {self.of(value())}"

    def _variable(self, value: contextvars.ContextVar[Any]) -> str:
        return f"variable {value.name} {self.numbered(value)}"

    def _class(self, value: type) -> str:
        name = _class(value)
        return f"{name} {self.numbered(value)}" if "<locals>" in name else name

    def _python_module(self, value: types.ModuleType) -> str:
        return f"Python module {value.__name__}"

    def _module(self, value: nn.Module) -> str:
        return self._places.get(id(value)) or f"{_class(type(value))} {self.numbered(value)}"

    def _tensor(self, value: torch.Tensor) -> str:
        if id(value) in self._places:
            return self._places[id(value)]
        kind = (type(value), value.shape, value.dtype, value.device, value.requires_grad)
        is_plain = value.layout == torch.strided and value.device.type == "cpu"
        if not is_plain or private.is_traced(value) or value.nbytes > _LARGEST_BYTES:
            raise NotNamed("a tensor whose numbers are not compared")
        return f"{self.of(kind)} {value.stride()} {_digest(bytes_of(value))} {self.numbered(value)}"

    def _array(self, value: numpy.ndarray) -> str:
        if value.nbytes > _LARGEST_BYTES:
            raise NotNamed("an array whose numbers are not compared")
        held = b"objects" if value.dtype.hasobject else value.tobytes()
        kind = (type(value), value.dtype.str, value.shape)
        return f"{self.of(kind)} {_digest(held)} {self.numbered(value)}"

    def _logger(self, value: logging.Logger) -> str:
        return f"logger {value.name}"

    def _pattern(self, value: re.Pattern[Any]) -> str:
        return f"pattern {value.pattern!r} {value.flags}"

    def _tree(self, value: Any) -> str:
        children = children_of_tree(value)
        return f"tree {self.all_of((value.type, value.context, tuple(children)))}"

    def _at_its_place(self, value: Any) -> str:
        return f"{_class(type(value))} {self.numbered(value)}"

    def _object(self, value: Any) -> str:
        kind = type(value)
        if kind in _BY_PLACE or (_shows_its_state(kind) and not is_ours(kind.__module__)):
            return self._at_its_place(value)
        raise NotNamed(f"a {_class(kind)}")


_PRINTED = frozenset({bool, int, float, complex, str, bytes, type(None)})
_NAMED_BY: tuple[tuple[Any, Callable[[Naming, Any], str]], ...] = (
    (Identity, Naming._identity),
    (enum.Enum, Naming._enum),
    (private.pytree.TreeSpec, Naming._tree),
    (_BY_TEXT, Naming._text),
    (PLAIN, Naming._plain),
    (type, Naming._class),
    (tuple, Naming._tuple),
    (frozenset, Naming._frozenset),
    (slice, Naming._slice),
    (types.FunctionType, Naming._function),
    (_BUILTINS, Naming._builtin),
    (types.MethodType, Naming._method),
    ((functools.partial, functools.partialmethod), Naming._partial),
    (property, Naming._property),
    (functools.cached_property, Naming._cached_property),
    (WRAPPERS, Naming._wrapped),
    (weakref.ref, Naming._reference),
    (contextvars.ContextVar, Naming._variable),
    (types.ModuleType, Naming._python_module),
    (nn.Module, Naming._module),
    (torch.Tensor, Naming._tensor),
    (numpy.ndarray, Naming._array),
    (logging.Logger, Naming._logger),
    (re.Pattern, Naming._pattern),
    (DecoratingContext, Naming._context),
)


def _content(cell: types.CellType) -> Any:
    """Return what a cell holds; a container as what is in it."""
    content = content_of(cell)
    if isinstance(content, dict | types.MappingProxyType):
        return "dict", tuple(content.items())
    return ("list", tuple(content)) if type(content) is list else content


def _class(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _shows_its_state(kind: type) -> bool:
    """Whether all that objects of a class hold lies in attributes, slots, or as in a container.

    Those of classes made in C hold more than that.
    """
    containers = [base for base in (dict, list, set, collections.deque) if issubclass(kind, base)]
    base = containers[0].__basicsize__ if containers else object.__basicsize__
    slots = 0
    for each in kind.__mro__:
        own = vars(each).get("__slots__", ())
        slots += 1 if isinstance(own, str) else len(own)
    dictionary_and_references = 2
    return kind.__basicsize__ <= base + _POINTER_BYTES * (slots + dictionary_and_references)
