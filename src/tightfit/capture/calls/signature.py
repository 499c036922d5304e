"""What a captured step depends on: the guards of its plan.

A captured step holds for one combination of input shapes, module flags and modes. Its signature
is compared on every call; any difference means another plan.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import nn

from tightfit.capture.calls.structure import FUNCTIONS, PLAIN
from tightfit.capture.calls.structure import flatten as flatten_tree
from tightfit.errors import BadInput, CaptureError
from tightfit.torch_private import core as private
from tightfit.torch_private import tools as tools
from tightfit.torch_private.saving import saving_hook

__all__ = [
    "call_signature",
    "differ_in_sizes_only",
    "flatten",
    "hooked_modules",
    "input_signature",
    "module_signature",
    "refuse_lazy",
    "refuse_subclass",
    "refuse_transforms",
    "same_attributes",
]

_BY_IDENTITY = (torch.Generator, torch.Tensor, *FUNCTIONS, type)
_CONTAINERS = (tuple, list, dict, set)
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
_KEPT_APART = frozenset(nn.Module().__dict__) | {"forward"}
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


class _Identity:
    """Equal for one and the same object; another one that takes its address later is another."""

    __slots__ = ("_address", "_object")

    def __init__(self, value: Any) -> None:
        self._address = id(value)
        try:
            self._object = weakref.ref(value)
        except TypeError:  # it cannot be told when it dies, so it must not
            self._object = functools.partial(lambda kept: kept, value)

    def __hash__(self) -> int:
        return self._address

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Identity) or self._address != other._address:
            return False
        value = self._object()
        return value is not None and value is other._object()


def call_signature(
    leaves: list[Any],
    spec: Any,
    modules: Mapping[str, nn.Module],
    root: nn.Module | None,
    kept: frozenset[tuple[str, str]] = frozenset(),
) -> tuple[Any, Any]:
    """Return all that a step depends on; see `input_signature` and `module_signature`."""
    return input_signature(leaves, spec), module_signature(modules, root, kept, leaves)


def input_signature(leaves: list[Any], spec: Any) -> tuple[Any, ...]:
    """Return what matters of the flattened inputs of a call, what they share included.

    Raises
    ------
    BadInput
        For an input that is neither a tensor nor plain data.
    """
    parts: list[Any] = [spec]
    first: dict[int, int] = {}
    storages: dict[int, int] = {}
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            refuse_subclass(leaf, f"input {index}")
            same = first.setdefault(id(leaf), index)
            shared = storages.setdefault(private.storage_key(leaf), index)
            parts.append((*_tensor(leaf), same, shared))
        elif isinstance(leaf, PLAIN):
            parts.append((type(leaf), leaf))
        else:
            raise BadInput(
                f"input {index} is a {type(leaf).__name__}: a planned call takes tensors, "
                "functions and plain values (numbers, text, None, dtypes, enums) in lists, tuples, "
                "dicts, named tuples, dataclasses and objects that hold nothing else"
            )
    return tuple(parts)


def differ_in_sizes_only(one: Any, other: Any) -> bool:
    """Whether two signatures, of inputs and modules, are of one call on inputs of two sizes."""
    (inputs, modules), (other_inputs, other_modules) = one, other
    return (
        modules == other_modules
        and len(inputs) == len(other_inputs)
        and inputs[0] == other_inputs[0]
        and all(map(_alike, inputs[1:], other_inputs[1:]))
    )


def _alike(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether two inputs are tensors that differ in sizes, or plain values of one type."""
    sizes = 2
    if len(one) > sizes and len(other) > sizes:
        return len(one[0]) == len(other[0]) and one[sizes:] == other[sizes:]
    return len(one) == len(other) and (one[0] is other[0] is int or one == other)


def refuse_subclass(tensor: torch.Tensor, where: str) -> None:
    """Refuse tensors whose class decides what operators do.

    Raises
    ------
    CaptureError
        For a DTensor, a nested tensor, any other subclass, and for sparse layouts.
    """
    kind = type(tensor)
    if private.is_wrapper(tensor) or (
        kind not in (torch.Tensor, nn.Parameter, nn.Buffer, private.FakeTensor)
        and not isinstance(tensor, nn.Parameter)
    ):
        raise CaptureError(
            f"{where} is a {kind.__name__}, a tensor whose class decides what operators do and "
            "what they hold: it cannot be planned. Way out: pass plain tensors (a nested tensor: "
            "padded; a DTensor: fit the blocks inside, on local tensors), or mark the module that "
            "uses it with tightfit.opaque"
        )
    if tensor.layout != torch.strided:
        raise CaptureError(
            f"{where} is a sparse tensor: what operators on it hold depends on the data and cannot "
            "be planned. Way out: pass it dense, or leave what uses it out of the fitted part"
        )


def refuse_transforms(name: str) -> None:
    """Refuse a call within what differentiates by itself: a plan has only the one backward.

    Raises
    ------
    CaptureError
        Within `torch.func.grad`, `vmap`, `jvp` and the like, and forward-mode differentiation.
    """
    transform = tools.running_transform()
    if transform:
        raise CaptureError(
            f"{name} is fitted and called within {transform}, which a planned call cannot follow. "
            "Way out: put the transform into the function that is planned (tightfit.step, or a "
            "module's forward), or tightfit.unfit the model"
        )


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


def _tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    layout = tensor.stride() if tensor.layout == torch.strided else str(tensor.layout)
    return (tuple(tensor.shape), layout, tensor.dtype, tensor.device, tensor.requires_grad)


def module_signature(
    modules: Mapping[str, nn.Module],
    root: nn.Module | None,
    kept: frozenset[tuple[str, str]] = frozenset(),
    leaves: Iterable[Any] = (),
) -> tuple[Any, ...]:
    """Return what matters of modules: parameters, buffers, flags, plain attributes, hooks, modes.

    Modules that are alike have the same signature.

    Parameters
    ----------
    modules : mapping of str to nn.Module
        The modules a step uses.
    root : nn.Module or None
        The module whose own hooks run around the step and so do not matter.
    kept : set of (str, str)
        Modules and their attributes that every forward changes.
    leaves : iterable
        The call's inputs, which may be parameters or buffers themselves.
    """
    parts: list[Any] = [_modes(), private.global_settings()]
    seen = {id(leaf): i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
    for prefix, top in modules.items():
        for name, module in top.named_modules(remove_duplicate=False):
            parts.append((prefix, name, type(module), module.training))
            own = _attributes(module)
            if kept:
                place = f"{prefix}.{name}".rstrip(".")
                own = [(key, value) for key, value in own if (place, key) not in kept]
            parts.extend(own)
            if module is not root:
                parts.append(tuple(tuple(getattr(module, hooks)) for hooks in _HOOKS))
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    refuse_lazy(parameter, f"{name}.{key}".lstrip("."))
                    number = seen.setdefault(id(parameter), len(seen))  # tells which are shared
                    parts.append((key, number, *_tensor(parameter)))
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    number = seen.setdefault(id(buffer), len(seen))
                    parts.append((key, number, *_tensor(buffer)))
    return tuple(parts)


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


def _attributes(module: nn.Module) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in module.__dict__.items():
        if key in _SKIPPED:
            continue
        match _counts_by(type(value)):
            case "value":
                found.append((key, value))
            case "identity":
                found.append((key, _Identity(value)))
            case "contents" if key not in _KEPT_APART:
                contents = _plain_contents(value)
                if contents is not None:
                    found.append((key, contents))
            case _:
                pass
    return found


def _plain_contents(value: Any) -> Any:
    """Return what a container holds, hashable; None if there is more than plain values in it."""
    elements = value.items() if isinstance(value, dict) else value
    contents: list[Any] = []
    for element in elements:
        match _counts_by(type(element)):
            case "value":
                contents.append(element)
            case "contents":
                contents.append(_plain_contents(element))
                if contents[-1] is None:
                    return None
            case _:
                return None
    held = frozenset(contents) if isinstance(value, set) else tuple(contents)
    return type(value), held


@functools.cache
def _counts_by(kind: type) -> Literal["value", "identity", "contents", "nothing"]:
    """Return what tells attributes of a class apart; asking of each anew takes long."""
    if issubclass(kind, PLAIN):
        return "value"
    if issubclass(kind, _BY_IDENTITY):
        return "identity"
    return "contents" if issubclass(kind, _CONTAINERS) else "nothing"


def same_attributes(one: Mapping[str, nn.Module], other: Mapping[str, nn.Module]) -> bool:
    """Whether modules of the same signature also agree in every further attribute.

    A signature tells whether one module has changed; it leaves out attributes that would be dear to
    compare at every call, in which two modules of a class may well differ. Attributes whose names
    begin with two underscores are what tools such as FSDP2 keep in a module.
    """
    return one.keys() == other.keys() and all(
        _same(_further_attributes(a), _further_attributes(b))
        for name, top in one.items()
        for a, b in zip(top.modules(), other[name].modules(), strict=True)
    )


def _further_attributes(module: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in module.__dict__.items()
        if name not in _KEPT_APART and not name.startswith("__")
    }


def _same(one: Any, other: Any) -> bool:
    """Whether two attributes are one object, equal plain data, or such things in containers."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return isinstance(one, PLAIN) and one == other


def _modes() -> tuple[Any, ...]:
    """What the modes of PyTorch are: gradients, autocast of every device type, saving hooks."""
    casts = []
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            casts.append((device, torch.get_autocast_dtype(device)))
    kept = torch.is_autocast_cache_enabled(), private.autocast_nesting() > 0
    around = bool(saving_hook()), private.caches_parametrizations()
    return (torch.is_grad_enabled(), tuple(casts), *kept, *around)


def flatten(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """Return the leaves of a call's inputs and how they nest."""
    return flatten_tree((args, kwargs))
