"""What modules are now, as far as plans depend on it; looked up anew only where it has changed."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import nn

from tightfit.capture.calls.attributes import FLAGS, KEPT_APART, Attributes, ReadAttributes
from tightfit.errors import CaptureError

__all__ = [
    "ModuleSignature",
    "SeenModules",
    "hooked_modules",
    "refuse_lazy",
    "tensor_signature",
]

_SKIPPED = frozenset(
    {
        "training",
        "forward",
        "_parameters",
        "_buffers",
        "_modules",
        "_non_persistent_buffers_set",
        "_is_full_backward_hook",
        "__reduce_ex__",  # how a fitted module is copied and saved
        "__deepcopy__",
    }
)
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_HOLDERS = ("_parameters", "_buffers")

Place = tuple[str, str]


class ModuleSignature:
    """What matters of modules; modules that are alike have equal ones. Hashed once."""

    __slots__ = ("_hash", "_parts")

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self._parts = parts
        self._hash = hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            isinstance(other, ModuleSignature)
            and self._hash == other._hash
            and self._parts == other._parts
        )


class SeenModules:
    """Modules as they were when last asked about: their signature, and their tensors by name.

    What has not changed since then is not looked up again, so that asking at every call costs
    about a microsecond for each module and tensor. Nothing that a module holds is kept alive.

    Parameters
    ----------
    modules : mapping of str to nn.Module
        The modules that a step uses.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._seen: list[_SeenModule] = []
        self._asked: tuple[int, frozenset[Place], ReadAttributes | None] | None = None
        self._numbers: dict[int, int] = {}
        self._signature = ModuleSignature(())
        self._places: dict[str, tuple[_SeenModule, str, str]] | None = None

    def signature(
        self,
        root: nn.Module | None,
        kept: frozenset[Place] = frozenset(),
        leaves: Iterable[Any] = (),
        read: ReadAttributes | None = None,
    ) -> tuple[Any, ...]:
        """Return what matters of the modules: parameters, buffers, flags, plain attributes, hooks.

        Parameters
        ----------
        root : nn.Module or None
            The module whose own hooks run around the step and so do not matter.
        kept : set of (str, str)
            Modules and their attributes that every forward changes.
        leaves : iterable
            The call's inputs, which may be parameters or buffers themselves.
        read : ReadAttributes, optional
            Those that matter; None: all.

        Raises
        ------
        CaptureError
            If a parameter has no shape yet.
        """
        asked = id(root), kept, read
        changed = [seen for seen in self._seen if not seen.holds()]
        if asked != self._asked or not self._seen or any(seen.is_elsewhere() for seen in changed):
            self._look_anew(root, kept, read)
            self._asked = asked
        elif changed:
            for seen in changed:
                seen.look()
            self._note()
        given = [
            (index, self._numbers[id(leaf)])
            for index, leaf in enumerate(leaves)
            if id(leaf) in self._numbers
        ]
        return (self._signature, *given)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a parameter or buffer as it is now, by its name among the modules.

        Raises
        ------
        KeyError
            If there was none of that name when a signature was last asked for.
        """
        if self._places is None:
            self._places = {
                ".".join(part for part in (*seen.place, key) if part): (seen, holder, key)
                for seen in self._seen
                for holder in _HOLDERS
                for key in seen.held(holder)
            }
        seen, holder, key = self._places[name]
        return seen.held(holder)[key]

    def _look_anew(
        self, root: nn.Module | None, kept: frozenset[Place], read: ReadAttributes | None
    ) -> None:
        self._asked = None
        self._places = None
        self._seen = [
            _SeenModule((prefix, name), module, module is root, kept, read)
            for prefix, top in self._modules.items()
            for name, module in top.named_modules(remove_duplicate=False)
        ]
        self._note()

    def _note(self) -> None:
        """Put together what was seen of all modules; numbers tell which tensors are shared."""
        self._places = None
        self._numbers = {}
        for seen in self._seen:
            for tensor in seen.tensors():
                self._numbers.setdefault(id(tensor), len(self._numbers))
        shared = tuple(self._numbers[id(t)] for seen in self._seen for t in seen.tensors())
        self._signature = ModuleSignature((*(seen.part for seen in self._seen), shared))


class _SeenModule:
    """One module as it was when it was last looked at; does not keep it alive.

    Parameters
    ----------
    place : (str, str)
        The name of the top module, and the name within that.
    module : nn.Module
        The module.
    is_root : bool
        Whether its own hooks run around the step and so do not matter.
    kept : set of (str, str)
        Modules and attributes that do not matter.
    read : ReadAttributes or None
        The attributes that matter; None: all.

    Attributes
    ----------
    part : tuple
        What matters of it, but for which of its tensors are shared.
    """

    def __init__(
        self,
        place: Place,
        module: nn.Module,
        is_root: bool,
        kept: frozenset[Place],
        read: ReadAttributes | None,
    ) -> None:
        self.place = place
        self._module = weakref.ref(module)
        self._is_root = is_root
        own = f"{place[0]}.{place[1]}".rstrip(".")
        self._left_out = _SKIPPED | {key for name, key in kept if name == own}
        self._read = read
        self.look()

    def look(self) -> None:
        """Look at all of it anew."""
        module = self._module()
        assert module is not None
        own = _attributes_of(module)
        self._kind = type(module)
        left_out, is_known = self._left_out, False
        if self._read is not None and self._kind in self._read.kinds:
            left_out, is_known = left_out | (own.keys() - self._read.names - KEPT_APART), True
        self._attributes = Attributes(own, left_out, with_tensors=not is_known)
        self._hooks = () if self._is_root else _hook_keys(own)
        self._children = _children(own)
        self._held = [_SeenTensors(own[holder], self.place[1]) for holder in _HOLDERS]
        self.part = (
            *self.place,
            self._kind,
            *self._attributes.part,
            self._hooks,
            *(held.part for held in self._held),
        )

    def holds(self) -> bool:
        """Whether nothing has changed since."""
        module = self._module()
        if module is None or type(module) is not self._kind:
            return False
        own = _attributes_of(module)
        return (
            self._attributes.hold(own)
            and (self._is_root or _hook_keys(own) == self._hooks)
            and _children(own) == self._children
            and all(map(_SeenTensors.hold, self._held, _holders(own)))
        )

    def is_elsewhere(self) -> bool:
        """Whether it is gone, or has other modules within."""
        module = self._module()
        return module is None or _children(_attributes_of(module)) != self._children

    def tensors(self) -> list[torch.Tensor]:
        """Return its own parameters and buffers."""
        return [t for holder in _HOLDERS for t in self.held(holder).values() if t is not None]

    def held(self, holder: str) -> dict[str, Any]:
        """Return its own parameters or buffers by name."""
        module = self._module()
        assert module is not None
        return _attributes_of(module)[holder]


_hooks_of, _holders = itemgetter(*_HOOKS), itemgetter(*_HOLDERS)


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module; a scripted one has some of them elsewhere."""
    own = module.__dict__
    if "training" in own and "_parameters" in own:
        return own
    return {**own, **{name: getattr(module, name) for name in _EVERY_MODULES}}


def _hook_keys(own: dict[str, Any]) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, _hooks_of(own)))


def _children(own: dict[str, Any]) -> tuple[Any, ...]:
    """Return which modules are within; addresses do, since each of them is known to be alive."""
    within = own["_modules"]
    return (*within.keys(), *map(id, within.values())) if within else ()


_EVERY_MODULES = (*FLAGS, *_HOOKS, *_HOLDERS, "_modules")


class _SeenTensors:
    """The parameters or the buffers of a module, as they were when it was looked at."""

    def __init__(self, held: dict[str, Any], name: str) -> None:
        self._names = tuple(held.keys())
        self._seen: list[tuple[Any, Any] | None] = []
        self.part: tuple[Any, ...] = ()
        for key, tensor in held.items():
            if tensor is None:
                self._seen.append(None)
                continue
            refuse_lazy(tensor, f"{name}.{key}".lstrip("."))
            signature = tensor_signature(tensor)
            self._seen.append((weakref.ref(tensor), signature))
            self.part += (key, signature)

    def hold(self, held: dict[str, Any]) -> bool:
        """Whether they are still the same, of the same shapes."""
        if len(held) != len(self._names):
            return False
        if not held:
            return True
        return tuple(held.keys()) == self._names and all(map(_is_same, self._seen, held.values()))


def _is_same(seen: tuple[Any, Any] | None, tensor: torch.Tensor | None) -> bool:
    if seen is None or tensor is None:
        return seen is tensor
    reference, signature = seen
    return reference() is tensor and tensor_signature(tensor) == signature


_facts = attrgetter("dtype", "device", "requires_grad")


def tensor_signature(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what matters of a tensor but for its numbers: shape and layout first."""
    layout = tensor.stride() if tensor.layout == torch.strided else str(tensor.layout)
    return (tensor.shape, layout, *_facts(tensor))


def refuse_lazy(tensor: torch.Tensor, where: str) -> None:
    """Refuse a parameter or buffer of a lazy module that has no shape yet.

    Raises
    ------
    CaptureError
        If it has none.
    """
    if nn.parameter.is_lazy(tensor):
        raise CaptureError(
            f"{where} is lazy, without a shape yet: call the model once, without gradients, before "
            "it is planned"
        )


def hooked_modules(
    modules: Mapping[str, nn.Module], root: nn.Module | None
) -> list[tuple[str, nn.Module]]:
    """Return the modules with hooks of their own, the root left out, with their names."""
    return [
        (name, module)
        for top in modules.values()
        for name, module in top.named_modules()
        if module is not root and any(getattr(module, hooks) for hooks in _HOOKS)
    ]
