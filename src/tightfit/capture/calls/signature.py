"""The signature of a call: the guards of a captured step and its plan.

A captured step holds for one combination of input shapes, module flags and modes. Its signature
is compared on every call; any difference means another plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from tightfit.capture.calls.structure import PLAIN
from tightfit.errors import WITHOUT_A_PLAN, BadInput, CaptureError
from tightfit.torch_private import core as private
from tightfit.torch_private.saving import saving_hook
from tightfit.torch_private.settings import global_settings

_facts = attrgetter("dtype", "device", "requires_grad", "is_leaf")


def modes_and_settings() -> tuple[Any, Any]:
    """Return the modes of PyTorch that a step depends on, then the settings."""
    return _modes(), global_settings()


def input_signature(leaves: Sequence[Any], spec: Any) -> tuple[Any, ...]:
    """Return the signature of the flattened inputs of a call, shared storages included.

    Raises `BadInput` for an input that is neither a tensor nor plain data.
    """
    parts: list[Any] = [spec]
    first: dict[int, int] = {}
    storages: dict[int, int] = {}
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            refuse_subclass(leaf, f"input {index}")
            same = first.setdefault(id(leaf), index)
            shared = storages.setdefault(private.storage_key(leaf), index)
            parts.append((*tensor_signature(leaf), same, shared, leaf.is_conj()))
        elif isinstance(leaf, PLAIN):
            parts.append((type(leaf), leaf))
        else:
            raise BadInput(
                f"input {index} is a {type(leaf).__name__}. A planned call takes tensors, "
                "functions and plain values (numbers, text, None, dtypes, enums) in lists, tuples, "
                "dicts, named tuples, dataclasses and objects that hold nothing else. "
                f"{WITHOUT_A_PLAN}"
            )
    return tuple(parts)


def tensor_signature(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the signature of a tensor, without its values: shape and layout first."""
    layout = tensor.stride() if tensor.layout == torch.strided else str(tensor.layout)
    return (tensor.shape, layout, *_facts(tensor))


def shape_of_call(leaves: Sequence[Any], spec: Any) -> tuple[Any, ...]:
    """Return a key that is equal for calls whose steps are expected to run the same.

    It guards nothing: of objects and of tensors whose class decides what operators do, only the
    kind counts.
    """
    return spec, *map(_kind_of_input, leaves)


def _kind_of_input(leaf: Any) -> tuple[Any, ...]:
    if isinstance(leaf, torch.Tensor):
        return (type(leaf), tuple(leaf.shape), str(leaf.dtype), str(leaf.device))
    return (type(leaf), leaf) if isinstance(leaf, PLAIN) else (type(leaf),)


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


_PLAIN_KINDS = (torch.Tensor, nn.Parameter)


def refuse_subclass(tensor: torch.Tensor, where: str) -> None:
    """Refuse tensors whose class decides what operators do.

    Raises `CaptureError` for a DTensor, a nested tensor, any other subclass, and for sparse
    layouts.
    """
    kind = type(tensor)
    if kind in _PLAIN_KINDS and tensor.layout is torch.strided and not tensor.is_nested:
        return
    if private.is_wrapper(tensor) or (
        kind not in (torch.Tensor, nn.Parameter, nn.Buffer, private.FakeTensor)
        and not isinstance(tensor, nn.Parameter)
    ):
        raise CaptureError(
            f"{where} is a {kind.__name__}, a tensor whose class decides the operators that run "
            "and their memory: it cannot be planned. Way out: pass plain tensors (a nested tensor: "
            "padded; a DTensor: fit the blocks inside, on local tensors), or mark the module that "
            "uses it with tightfit.opaque"
        )
    if tensor.layout != torch.strided:
        raise CaptureError(
            f"{where} is a sparse tensor: the memory of operators on it depends on the data and "
            "cannot be planned. Way out: pass it dense, or leave the code that uses it out of the "
            "fitted part"
        )


def _modes() -> tuple[Any, ...]:
    """The modes of PyTorch: gradients, autocast of every device type, saving hooks."""
    kept = torch.is_autocast_cache_enabled(), private.autocast_nesting() > 0
    around = bool(saving_hook()), private.caches_parametrizations()
    return (torch.is_grad_enabled(), private.autocast_dtypes(), *kept, *around)
