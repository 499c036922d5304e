"""The memory of an optimizer's step, predicted by taking it on fake tensors."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Container, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from tightfit.allocator.live_on_fakes import LiveOnFakes
from tightfit.allocator.resident import resident_tensor_bytes
from tightfit.torch_private import core as private
from tightfit.torch_private.tools import step_without_hooks
from tightfit.units import rounded_up

SCALARS = 4
"""How many single numbers kernels hold as tensors, which are not seen on fakes."""


FAR_BYTES = 1 << 16
"""Tensors of state from this size on may be in far memory."""


@dataclass(frozen=True)
class StepNeeds:
    """The bytes that a step of an optimizer takes in addition."""

    states: tuple[tuple[str, int], ...]  # the bytes of new state on each kind of device
    temporary_bytes: int  # the most alive at once during the step, beyond bytes that stay after it
    large_bytes: int = 0  # of the state on the CPU, in tensors that may be in far memory

    def state_bytes(self, device: str) -> int:
        return dict(self.states).get(device, 0)


def step_needs(
    optimizer: Any,
    granularity: int,
    changes: Mapping[str, Any] = MappingProxyType({}),
    skipped: Container[int] = frozenset(),
) -> StepNeeds | None:
    """Return the memory that a step of an optimizer takes; None where it cannot be taken on fakes.

    `optimizer`: as it is now: with its state, or before its first step. `granularity`: the unit
    that the device's allocator rounds to, in bytes. `changes`: options of the optimizer to be taken
    in place of its own. `skipped`: identities of parameters that are taken to have no gradient.
    """
    try:
        return _taken_on_fakes(optimizer, granularity, changes, skipped)
    except Exception:  # an optimizer of any kind may fail on fakes in any way
        return None


def needs_of_parameter(
    optimizer: Any,
    group: Mapping[str, Any],
    like: torch.Tensor,
    granularity: int,
    elements: int | None = None,
) -> StepNeeds | None:
    """Return the memory that steps of one parameter take, first and later; see `step_needs`.

    `optimizer`: its settings are taken, and none of its state. `granularity`: the unit that the
    device's allocator rounds to, in bytes. `elements`: how many of its elements are stepped; None:
    all.
    """
    try:
        with private.FakeTensorMode(allow_non_fake_inputs=True):
            if elements is not None:
                like = torch.empty(elements, dtype=like.dtype, device=like.device)
            own = {**group, "params": [_fake_parameter(like)]}
            twin = type(optimizer)([own], **arguments_of(optimizer))
            return _taken_by(twin, granularity, steps=2)
    except Exception:  # an optimizer of any kind may fail on fakes in any way
        return None


def growing_bytes(optimizer: Any, granularity: int) -> int:
    """Return the bytes by which the state of an optimizer still grows while it steps.

    That of LBFGS holds two copies of all gradients for each entry of its history.

    `granularity`: the unit that the device's allocator rounds to, in bytes.
    """
    if not isinstance(optimizer, torch.optim.LBFGS):
        return 0
    group = optimizer.param_groups[0]  # it takes one group only, and keeps its state with the first
    parameters = group["params"]
    state = optimizer.state.get(parameters[0], {})  # asking by [] would make an entry
    entries = len(state.get("old_dirs", ()))
    copy_bytes = rounded_up(sum(p.nbytes for p in parameters), granularity)
    return 2 * copy_bytes * max(0, group["history_size"] - entries)


def _taken_on_fakes(
    optimizer: Any, granularity: int, changes: Mapping[str, Any], skipped: Container[int]
) -> StepNeeds:
    twins: dict[int, nn.Parameter] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(private.FakeTensorMode(allow_non_fake_inputs=True))
        groups = [{**_twin_group(g, twins, skipped), **changes} for g in optimizer.param_groups]
        arguments = {**arguments_of(optimizer), **changes}
        twin = type(optimizer)([g for g in groups if g["params"]], **arguments)
        for parameter, state in optimizer.state.items():
            if id(parameter) in twins:
                twin.state[twins[id(parameter)]] = _twin_state(state)
        return _taken_by(twin, granularity)


def _taken_by(twin: Any, granularity: int, steps: int = 1) -> StepNeeds:
    """Return the memory that steps of an optimizer of fakes take."""
    before = _state_tensors(twin)
    with LiveOnFakes(granularity) as counter:
        for _ in range(steps):
            step_without_hooks(type(twin))(twin)  # they count, log and synchronise
        after = _state_tensors(twin)
    there = {id(tensor) for tensor in before}
    made = [t for t in after if id(t) not in there]
    stays = resident_tensor_bytes(made, granularity)
    states = {
        kind: resident_tensor_bytes((t for t in made if t.device.type == kind), granularity)
        for kind in {t.device.type for t in made}
    }
    temporary_bytes = max(0, counter.peak_bytes - stays) + SCALARS * granularity
    large = (t for t in after if t.device.type == "cpu" and t.nbytes >= FAR_BYTES)
    large_bytes = resident_tensor_bytes(large, granularity)
    return StepNeeds(tuple(sorted(states.items())), temporary_bytes, large_bytes)


def _twin_group(
    group: Mapping[str, Any], twins: dict[int, nn.Parameter], skipped: Container[int]
) -> dict[str, Any]:
    params = []
    for parameter in group["params"]:
        if parameter.requires_grad and id(parameter) not in skipped:
            twins[id(parameter)] = fake = _fake_parameter(parameter)
            params.append(fake)
    return {**group, "params": params}


def _fake_parameter(parameter: torch.Tensor) -> nn.Parameter:
    fake = nn.Parameter(
        torch.empty_strided(
            parameter.shape, parameter.stride(), dtype=parameter.dtype, device=parameter.device
        )
    )
    fake.grad = torch.empty_like(fake)
    return fake


def _twin_state(state: Any) -> Any:
    """Return state with fakes in place of tensors; step counters keep their contents."""

    def twin(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.ndim == 0:  # a step counter, whose value is asked for
            return torch.ones((), dtype=leaf.dtype)
        return torch.empty_like(leaf)

    return private.pytree.tree_map(twin, dict(state))


def _state_tensors(optimizer: Any) -> list[torch.Tensor]:
    return [t for state in optimizer.state.values() for t in tensors_in(dict(state))]


def tensors_in(state: Any) -> list[torch.Tensor]:
    """Return the tensors of a parameter's state."""
    return [t for t in private.pytree.tree_leaves(state) if isinstance(t, torch.Tensor)]


def arguments_of(optimizer: Any) -> dict[str, Any]:
    """Return the defaults of an optimizer that its class takes as arguments."""
    taken = inspect.signature(type(optimizer)).parameters
    return {key: value for key, value in optimizer.defaults.items() if key in taken}
