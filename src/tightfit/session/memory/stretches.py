"""The step of one parameter taken a stretch of its elements at a time: less memory, same bits.

Most optimizers treat each element by itself. Their workspace is as large as the parameter, so a
large one is stepped in stretches where there is little room.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tightfit.execution.stepping import with_gradient
from tightfit.session.memory.one_by_one import plain_step

STRETCH = 1 << 19
"""Elements of a stretch."""

_TRIED = 1 << 15  # elements of a stretch that is tried
_SHAPE = (31, 5285)  # that is tried: almost five stretches
_STEPS = 3


def in_memory(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor laid out as a parameter."""
    return torch.empty_like(parameter, dtype=dtype, requires_grad=False)


def step_in_stretches(
    optimizer: Any,
    group: Mapping[str, Any],
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    elements: int,
    made: Callable[[torch.Tensor, torch.dtype], torch.Tensor] = in_memory,
) -> None:
    """Take an optimizer's step of one parameter, so many elements at a time.

    `optimizer`: its state of the parameter is written as its own step writes it. `parameter`,
    `gradient`: without gaps, and laid out alike. `made`: makes the whole of a state, laid out as a
    parameter.
    """
    before = optimizer.state.get(parameter, {})
    after = dict(before)
    flat = _flat(gradient)
    for begin in range(0, parameter.numel(), elements):
        part = slice(begin, begin + elements)
        state = {key: _part(value, parameter, part) for key, value in before.items()}
        state = _stepped(optimizer, group, (_flat(parameter)[part], flat[part]), state)
        for key, value in state.items():
            whole = after.get(key)
            if whole is None and isinstance(value, torch.Tensor) and value.dim():
                whole = made(parameter, value.dtype)
            after[key] = _put(value, whole, part)
        del state  # before the next stretch makes its own
    if after:
        optimizer.state[parameter].update(after)


def _stepped(
    optimizer: Any,
    group: Mapping[str, Any],
    piece: tuple[torch.Tensor, torch.Tensor],
    state: dict[str, Any],
) -> dict[str, Any]:
    """Step a part of a parameter with its gradient; return its state."""
    own, gradient = piece
    states: defaultdict[Any, Any] = defaultdict(dict, {own: state})
    with with_gradient(own, gradient):
        plain_step(optimizer, [{**group, "params": [own]}], states)
    return states[own]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without gaps as its elements in the order of memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _is_alike(value: Any, parameter: torch.Tensor) -> bool:
    """Whether a part of an optimizer's state has an element for each of a parameter."""
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape


def _part(value: Any, parameter: torch.Tensor, part: slice) -> Any:
    """Return a part of a state; tensors not by element are copied: each stretch changes them."""
    if _is_alike(value, parameter):
        return _flat(value)[part]
    return value.clone() if isinstance(value, torch.Tensor) else value


def _put(value: Any, whole: Any, part: slice) -> Any:
    """Return a state with the results of a stretch."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    mine = _flat(whole)[part]
    if mine.data_ptr() != value.data_ptr():
        mine.copy_(value)
    return whole


def has_same_bits(optimizer: Any, group: Mapping[str, Any], like: torch.Tensor) -> bool:
    """Whether stretches give the bits of a whole step: tried on a parameter of some size.

    `like`: a parameter of the group, for its dimensions, type and device.
    """
    try:
        return _has_same_bits(optimizer, group, like)
    except Exception:  # an optimizer of any kind may fail in any way
        return False


def _has_same_bits(optimizer: Any, group: Mapping[str, Any], like: torch.Tensor) -> bool:
    generator = torch.Generator().manual_seed(0)
    shape = _SHAPE[: like.dim()] if like.dim() > 1 else (_SHAPE[0] * _SHAPE[1],)
    shape = (*shape, *[1] * (like.dim() - len(shape)))

    def drawn() -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(like.device, like.dtype)

    whole = drawn()
    parts = whole.clone()
    twins = [_with_own_state(optimizer) for _ in range(2)]
    for _ in range(_STEPS):
        gradient = drawn()
        with with_gradient(whole, gradient.clone()):
            plain_step(twins[0], [{**group, "params": [whole]}])
        step_in_stretches(twins[1], group, parts, gradient, _TRIED)
    mine, theirs = (twin.state[p] for twin, p in zip(twins, (whole, parts), strict=True))
    if not torch.equal(whole, parts) or mine.keys() != theirs.keys():
        return False
    return all(_same(value, theirs[key]) for key, value in mine.items())


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return one == other


def _with_own_state(optimizer: Any) -> Any:
    """Return an optimizer with the same settings and no state."""
    twin = type(optimizer).__new__(type(optimizer))
    twin.__dict__.update({**optimizer.__dict__, "state": defaultdict(dict)})
    return twin
