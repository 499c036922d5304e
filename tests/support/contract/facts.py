"""What a user can see of a call: values, autograd's marks, what is a view of what."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

__all__ = ["Fact", "bits", "gradients", "leaves", "looked_at", "same", "state_of"]

Fact = tuple[str, Any]
"""Where it was seen, and what."""


def leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested containers, and of each container its type."""
    if isinstance(value, Mapping):
        yield path, type(value)
        for key, each in value.items():
            yield from leaves(each, f"{path}[{key!r}]")
    elif isinstance(value, (set, frozenset)):
        yield path, type(value)
        for index, each in enumerate(value):
            yield from leaves(each, f"{path}{{{index}}}")
    elif isinstance(value, Sequence) and not isinstance(value, str):
        yield path, (type(value), len(value))
        for index, each in enumerate(value):
            yield from leaves(each, f"{path}[{index}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield path, type(value)
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name), f"{path}.{field.name}")
    else:
        yield path, value


def state_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield parameters, buffers and public attributes of a module and of those inside it."""
    for prefix, each in module.named_modules():
        own = {**each._parameters, **each._buffers}
        own |= {k: v for k, v in vars(each).items() if not k.startswith("_")}
        for name, value in sorted(own.items()):
            if name not in ("forward", "training") and not callable(value):
                yield from leaves(value, f"{prefix}.{name}" if prefix else name)


def looked_at(named: Iterator[tuple[str, Any]] | list[tuple[str, Any]]) -> list[Fact]:
    """Return what can be seen of leaves, and of each pair of tensors among them."""
    facts: list[Fact] = []
    tensors: list[tuple[str, torch.Tensor]] = []
    for path, value in named:
        if isinstance(value, torch.Tensor):
            tensors.append((path, value))
            facts += _of_tensor(path, value)
        else:
            facts.append((path, value))
    for index, (path, tensor) in enumerate(tensors):
        for other_path, other in tensors[:index]:
            facts.append((f"{other_path} beside {path}", _beside(other, tensor)))
    return facts


def _of_tensor(path: str, tensor: torch.Tensor) -> list[Fact]:
    return [
        (f"{path}: type", (type(tensor), tensor.dtype, tensor.device.type)),
        (f"{path}: shape", tuple(tensor.shape)),
        (f"{path}: stride", tensor.stride()),
        (f"{path}: requires_grad", tensor.requires_grad),
        (f"{path}: is_leaf", tensor.is_leaf),
        (f"{path}: has grad_fn", tensor.grad_fn is not None),
        (f"{path}: value", bits(tensor)),
    ]


def _beside(first: torch.Tensor, second: torch.Tensor) -> tuple[bool, int | None, str]:
    """Return whether two are one object, how far apart they lie in one storage, whose base is.

    Of what needs no gradient, or lies in different storages, the base is nobody's concern.
    """
    shared = (
        first.untyped_storage()._cdata == second.untyped_storage()._cdata
        and first.device.type != "meta"
    )
    apart = second.data_ptr() - first.data_ptr() if shared else None
    base = ""
    if not (shared and first.requires_grad and second.requires_grad) or first is second:
        pass
    elif first._is_view() and first._base is second:
        base = "the second is the base"
    elif second._is_view() and second._base is first:
        base = "the first is the base"
    elif first._is_view() and second._is_view() and first._base is second._base:
        base = "one base"
    return first is second, apart, base


def gradients(named: list[tuple[str, Any]]) -> list[Fact]:
    """Return the gradients that tensors hold."""
    tensors = [(path, value) for path, value in named if isinstance(value, torch.Tensor)]
    return [
        (f"{path}: gradient", None if t.grad is None else bits(t.grad))
        for path, t in tensors
        if t.is_leaf or t.retains_grad
    ]


def bits(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a copy of a tensor's content, out of autograd; None where it has none."""
    if tensor.device.type == "meta":
        return None
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    return tensor.detach().resolve_conj().resolve_neg().clone()


def same(first: Any, second: Any) -> bool:
    """Whether two facts are one: tensors bit by bit, other values by type and equality."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return (
            first.dtype == second.dtype
            and first.shape == second.shape
            and torch.equal(_bytes(first), _bytes(second))
        )
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        return False
    if isinstance(first, float) and first != first:
        return isinstance(second, float) and second != second
    return type(first) is type(second) and bool(first == second)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.contiguous().reshape(-1)
    return (torch.view_as_real(flat) if flat.is_complex() else flat).contiguous().view(torch.uint8)
