"""Whether an optimizer steps each parameter by itself: tried on small parameters."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tightfit.errors import BadInput
from tightfit.execution.stepping import with_gradient
from tightfit.session.memory.forecast import arguments_of, tensors_in
from tightfit.torch_private.tools import step_without_hooks

_STEPS = 3
_LARGEST = 3  # elements in each dimension of parameters that are tried
_OUT = "Way out: fit without update_in_backward"


def plain_step(optimizer: Any, groups: Sequence[Mapping[str, Any]], state: Any = None) -> None:
    """Take an optimizer's step with other groups than its own; hooks of steps are not called.

    Attributes that the step writes, other than its state and its groups, are discarded.

    `state`: in place of its own.
    """
    kind = type(optimizer)
    twin = kind.__new__(kind)
    own = {"param_groups": list(groups), "state": optimizer.state if state is None else state}
    twin.__dict__.update({**optimizer.__dict__, **own})
    step_without_hooks(kind)(twin)


def refuse_unless_one_by_one(optimizer: Any) -> None:
    """Raise unless stepping parameters one by one gives the bits of stepping all at once.

    Raises `BadInput`: names the optimizer and the reason.
    """
    name = type(optimizer).__name__
    try:
        differs = _differs(optimizer)
    except Exception as error:  # an optimizer of any kind may fail in any way
        raise BadInput(
            f"update_in_backward=True: {name} cannot step one parameter by itself "
            f"({type(error).__name__}: {error}). {_OUT}"
        ) from error
    if differs:
        raise BadInput(
            f"update_in_backward=True: the step of {name} differs where it is taken one "
            f"parameter at a time: it reads more than a parameter, its gradient and its state. "
            f"{_OUT}"
        )


def _differs(optimizer: Any) -> bool:
    """Whether small parameters become something else where they are stepped one by one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        at_once = _small(optimizer)
        one_by_one = copy.deepcopy(at_once)
        for _ in range(_STEPS):
            pairs = list(zip(_parameters_of(at_once), _parameters_of(one_by_one), strict=True))
            gradients = [torch.randn_like(parameter) for parameter, _ in pairs]
            facts = _facts(at_once)
            _step_at_once(at_once, gradients)
            _step_one_by_one(one_by_one, gradients)
            if facts != _facts(at_once) or facts != _facts(one_by_one):
                return True
            if not all(_equal(one, other) for one, other in pairs):
                return True
        states = (_tensors(o) for o in (at_once, one_by_one))
        return not all(_equal(a, b) for a, b in zip(*states, strict=True))


def _step_at_once(optimizer: Any, gradients: Sequence[torch.Tensor]) -> None:
    with contextlib.ExitStack() as stack:
        for parameter, gradient in zip(_parameters_of(optimizer), gradients, strict=True):
            stack.enter_context(with_gradient(parameter, gradient.clone()))
        plain_step(optimizer, optimizer.param_groups)


def _step_one_by_one(optimizer: Any, gradients: Sequence[torch.Tensor]) -> None:
    """Step the last parameter first, as a backward does."""
    groups = [(g, p) for g in optimizer.param_groups for p in g["params"]]
    for (group, parameter), gradient in reversed(list(zip(groups, gradients, strict=True))):
        with with_gradient(parameter, gradient.clone()):
            plain_step(optimizer, [{**group, "params": [parameter]}])


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def _small(optimizer: Any) -> Any:
    """Return an optimizer with the same settings for a few small parameters of each group."""
    groups = []
    for group in optimizer.param_groups:
        shapes = {
            (tuple(min(n, _LARGEST) for n in p.shape), p.dtype, p.device): None
            for p in group["params"]
            if p.requires_grad
        }
        twice = [kind for kind in shapes for _ in range(2)]
        params = [
            nn.Parameter(torch.randn(shape, dtype=torch.float32).to(device, dtype))
            for shape, dtype, device in twice
        ]
        if params:
            groups.append({**group, "params": params})
    if not groups:
        raise BadInput("it holds no parameter that requires a gradient")
    return type(optimizer)(groups, **arguments_of(optimizer))


def _parameters_of(optimizer: Any) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _facts(optimizer: Any) -> list[dict[str, str]]:
    """Return the settings of an optimizer's groups, as text."""
    groups = optimizer.param_groups
    return [{key: repr(v) for key, v in group.items() if key != "params"} for group in groups]


def _tensors(optimizer: Any) -> list[torch.Tensor]:
    states = (optimizer.state.get(p, {}) for p in _parameters_of(optimizer))
    return [t for state in states for t in tensors_in(dict(state))]
