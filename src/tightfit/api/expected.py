"""Example inputs of the shapes to come, as the user may give them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from tightfit.capture.calls.structure import flatten, unflatten
from tightfit.errors import BadInput

__all__ = ["worst_first"]


def worst_first(
    shapes: Iterable[Any], modules: Mapping[str, nn.Module]
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return the calls that example inputs stand for, the one with most elements first.

    Parameters
    ----------
    shapes : iterable
        For each call a tuple of positional inputs, a mapping of keyword inputs, or one tensor.
        A tensor on the ``"meta"`` device stands for zeros on the modules' device.
    modules : mapping of str to nn.Module
        Their first parameter tells the device.

    Raises
    ------
    BadInput
        If one of them is something else.
    """
    calls = [_call(example) for example in shapes]
    device = next((p.device for m in modules.values() for p in m.parameters()), None)
    return sorted((_real(call, device) for call in calls), key=_elements, reverse=True)


def _call(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, torch.Tensor):
        return (example,), {}
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, tuple):
        return example, {}
    raise BadInput(
        "shapes= takes for each shape a tuple of positional inputs, a dict of keyword inputs or "
        f"one tensor, got a {type(example).__name__}"
    )


def _real(call: Any, device: torch.device | None) -> Any:
    """Return the call with zeros in place of tensors that have no contents."""
    leaves, spec = flatten(call)
    return unflatten([_zeros(leaf, device) for leaf in leaves], spec)


def _zeros(leaf: Any, device: torch.device | None) -> Any:
    if not isinstance(leaf, torch.Tensor) or leaf.device.type != "meta":
        return leaf
    zeros = torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)
    return zeros.requires_grad_(leaf.requires_grad)


def _elements(call: tuple[tuple[Any, ...], dict[str, Any]]) -> int:
    leaves, _ = flatten(call)
    return sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))
