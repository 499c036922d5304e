"""What modules are now, as far as plans depend on it; looked up anew only where it has changed."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from tightfit._core import _engine
from tightfit.capture.calls.attributes import FLAGS, KEPT_APART, Attributes, ReadAttributes
from tightfit.errors import CaptureError

__all__ = [
    "HOOKS",
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
HOOKS = (
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

    def __iter__(self) -> Iterator[Any]:
        """Iterate over what matters of each."""
        return iter(self._parts)

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
        self._plain: list[_SeenModule] = []  # whom the core compares, with what they were
        self._records: list[tuple[Any, ...]] = []
        self._others: list[_SeenModule] = []
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
        changed = self._changed()
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

    def _changed(self) -> list[_SeenModule]:
        """Return those that are not what they were."""
        changed = [self._plain[i] for i in _engine.changed_modules(self._records)]
        return changed + [seen for seen in self._others if not seen.holds()]

    def _look_anew(
        self, root: nn.Module | None, kept: frozenset[Place], read: ReadAttributes | None
    ) -> None:
        self._asked = None
        self._places = None
        named = [
            ((prefix, name), module)
            for prefix, top in self._modules.items()
            for name, module in top.named_modules(remove_duplicate=False)
        ]
        by_name: dict[str, set[str]] = {}
        for name, key in kept:
            by_name.setdefault(name, set()).add(key)
        left_out: dict[int, set[str]] = {}  # by module: one may have several names
        for place, module in named:
            own = by_name.get(".".join(place).rstrip("."), set())
            left_out.setdefault(id(module), set()).update(own)
        self._seen = [
            _SeenModule(place, module, module is root, frozenset(left_out[id(module)]), read)
            for place, module in named
        ]
        self._note()

    def _note(self) -> None:
        """Put together what was seen of all modules; numbers tell which tensors are shared."""
        self._places = None
        self._plain = [seen for seen in self._seen if seen.is_plain]
        self._others = [seen for seen in self._seen if not seen.is_plain]
        self._records = [seen.record for seen in self._plain]
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
    left_out : set of str
        Its attributes that do not matter.
    read : ReadAttributes or None
        The attributes that matter; None: all.

    Attributes
    ----------
    part : tuple
        What matters of it, but for which of its tensors are shared.
    record : tuple
        The same for the core to compare.
    is_plain : bool
        Whether the core can compare all of it.
    """

    def __init__(
        self,
        place: Place,
        module: nn.Module,
        is_root: bool,
        left_out: frozenset[str],
        read: ReadAttributes | None,
    ) -> None:
        self.place = place
        self._module = weakref.ref(module)
        self._is_root = is_root
        self._left_out = _SKIPPED | left_out
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
        hooks = () if self._is_root else tuple((name, tuple(own[name]), None) for name in HOOKS)
        within = own["_modules"]
        self._children = ("_modules", tuple(within), tuple(map(id, within.values())))
        held = [_seen_tensors(own[holder], self.place[1]) for holder in _HOLDERS]
        self.is_plain = self._attributes.are_plain and own is module.__dict__
        self.record = (
            self._module,
            self._kind,
            *self._attributes.record,
            (self._children, *hooks),
            tuple((name, *seen) for name, seen in zip(_HOLDERS, held, strict=True)),
        )
        self.part = (
            *self.place,
            self._kind,
            *self._attributes.part,
            tuple(keys for _, keys, _ in hooks),
            *(_named_signatures(names, signatures) for names, _, signatures in held),
        )

    def holds(self) -> bool:
        """Whether nothing has changed since."""
        module = self._module()
        if module is None:
            return False
        own = _attributes_of(module)
        return _engine.same_module(self.record, own) and self._attributes.others_hold(own)

    def is_elsewhere(self) -> bool:
        """Whether it is gone, or has other modules within."""
        module = self._module()
        if module is None:
            return True
        within = _attributes_of(module)["_modules"]
        return (tuple(within), tuple(map(id, within.values()))) != self._children[1:]

    def tensors(self) -> list[torch.Tensor]:
        """Return its own parameters and buffers."""
        return [t for holder in _HOLDERS for t in self.held(holder).values() if t is not None]

    def held(self, holder: str) -> dict[str, Any]:
        """Return its own parameters or buffers by name."""
        module = self._module()
        assert module is not None
        return _attributes_of(module)[holder]


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module; a scripted one has some of them elsewhere."""
    own = module.__dict__
    if "training" in own and "_parameters" in own:
        return own
    return {**own, **{name: getattr(module, name) for name in _EVERY_MODULES}}


_EVERY_MODULES = (*FLAGS, *HOOKS, *_HOLDERS, "_modules")


def _seen_tensors(held: dict[str, Any], name: str) -> tuple[tuple[Any, ...], ...]:
    """Return the names of parameters or buffers, weak references, signatures; None: none there."""
    for key, tensor in held.items():
        if tensor is not None:
            refuse_lazy(tensor, f"{name}.{key}".lstrip("."))
    references = tuple(None if t is None else weakref.ref(t) for t in held.values())
    signatures = tuple(None if t is None else tensor_signature(t) for t in held.values())
    return tuple(held), references, signatures


def _named_signatures(names: tuple[Any, ...], signatures: tuple[Any, ...]) -> tuple[Any, ...]:
    pairs = zip(names, signatures, strict=True)
    return tuple(part for name, seen in pairs if seen is not None for part in (name, seen))


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
        if module is not root and any(getattr(module, hooks) for hooks in HOOKS)
    ]
