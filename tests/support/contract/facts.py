"""What a user can see of a call: values, autograd's marks, what is a view of what."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import nn

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
    elif isinstance(value, numpy.ndarray):
        yield path, value.tolist()
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
            pair = f"{other_path} beside {path}"
            facts.append((pair, _beside(other, tensor)))
            facts.append((f"{pair}: base", _base_of(other, tensor)))
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


def _share_storage(first: torch.Tensor, second: torch.Tensor) -> bool:
    storages = first.untyped_storage()._cdata, second.untyped_storage()._cdata
    return storages[0] == storages[1] and first.device.type != "meta"


def _beside(first: torch.Tensor, second: torch.Tensor) -> tuple[bool, int | None]:
    """Return whether two are one object, and how far apart they lie in one storage."""
    shared = _share_storage(first, second)
    return first is second, second.data_ptr() - first.data_ptr() if shared else None


class _Anything:
    """What does not matter: equal to whatever is found in its place."""

    def __repr__(self) -> str:
        return "anything"


ANYTHING = _Anything()


def _base_of(first: torch.Tensor, second: torch.Tensor) -> Any:
    """Return which of two is the base of the other.

    Of what needs no gradient, or has different storages, or is one of many views that one
    operator has made (which must not be changed in place), it does not matter.
    """
    shared = _share_storage(first, second) and first.requires_grad and second.requires_grad
    if not shared or first is second or _is_one_of_many(first) or _is_one_of_many(second):
        return ANYTHING
    if first._is_view() and first._base is second:
        return "the second is the base"
    if second._is_view() and second._base is first:
        return "the first is the base"
    both = first._is_view() and second._is_view()
    return "one base" if both and first._base is second._base else "none"


def _is_one_of_many(tensor: torch.Tensor) -> bool:
    return type(tensor.grad_fn).__name__.startswith(("Split", "Unbind", "Chunk", "UnsafeSplit"))


def leaves_of_history(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the leaves a tensor was computed of."""
    waiting = [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None:
            waiting += [following for following, _ in node.next_functions]
            if hasattr(node, "variable"):
                yield node.variable


def gradients(named: list[tuple[str, Any]]) -> list[Fact]:
    """Return the gradients that tensors hold."""
    tensors = [(path, value) for path, value in named if isinstance(value, torch.Tensor)]
    return [
        (f"{path}: gradient", None if t.grad is None else bits(t.grad))
        for path, t in tensors
        if t.is_leaf or t.retains_grad
    ]


def bits(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a copy of a tensor's content, out of autograd; None where it has none.

    It is in memory of Python's, which no budget counts.
    """
    if tensor.device.type == "meta":
        return None
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    tensor = tensor.resolve_conj().resolve_neg()
    if not tensor.numel():
        return tensor.clone()
    content = bytearray(_bytes(tensor).numpy().tobytes())
    return torch.frombuffer(content, dtype=tensor.dtype).reshape(tensor.shape)


def same(first: Any, second: Any) -> bool:
    """Whether a fact is as expected: tensors bit by bit, other values by type and equality."""
    if first is ANYTHING:
        return True
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
