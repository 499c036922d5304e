"""Random numbers as a function: the generator's state is read, passed on and returned.

A compiler may reorder and fuse operators, so a graph it is given must not depend on a hidden
generator. Here every operator that draws takes the state as an argument and returns the next. Data
alone then fixes the order of the draws, and the same state draws the same numbers again.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tightfit.allocator.devices import get_state, set_state
from tightfit.capture.nodes import draws
from tightfit.torch_private.core import OpOverload

_LIBRARY = torch.library.Library("tightfit", "FRAGMENT")
_ALIAS = r"\([a-z]!\)"  # in a schema, says that an argument is written in place
_DEFINED: dict[OpOverload, Any] = {}


def draw(operator: OpOverload, state: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run a random operator from a given state.

    `operator`: if it writes in place, it leaves its argument alone and returns the result instead.
    `state`: where the generator starts. Returns the next state, then the operator's outputs.
    """
    return _with_state(operator)(state, *args, **kwargs)


def _with_state(operator: OpOverload) -> Any:
    """Return the operator that takes a state and returns the next; define it once."""
    if operator not in _DEFINED:
        name = "with_state_" + operator.name().replace("::", "_").replace(".", "_")
        takes, returns = str(operator._schema).split("(", 1)[1].rsplit(" -> ", 1)
        signature = f"Tensor generator_state, {takes} -> (Tensor, {returns.strip('()')})"
        _LIBRARY.define(f"{name}({re.sub(_ALIAS, '', signature)}")

        def real(state: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return _run(operator, state, args, kwargs)

        def fake(state: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return (torch.empty_like(state), *_outputs(operator, args, kwargs))

        _LIBRARY.impl(name, real, "CompositeExplicitAutograd")
        torch.library.register_fake(f"tightfit::{name}", fake, lib=_LIBRARY)
        _DEFINED[operator] = getattr(torch.ops.tightfit, name).default
    return _DEFINED[operator]


def _run(operator: Any, state: torch.Tensor, args: Any, kwargs: Any) -> Any:
    device = _device_of(args, kwargs)
    before = get_state(device)
    set_state(device, state)
    try:
        outputs = _outputs(operator, args, kwargs)
        return (get_state(device), *outputs)
    finally:
        set_state(device, before)


def _outputs(operator: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    if operator._schema.is_mutable:
        args = (args[0].clone(), *args[1:])
    outputs = operator(*args, **kwargs)
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _device_of(args: Any, kwargs: Any) -> torch.device:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor | torch.device):
            return value.device if isinstance(value, torch.Tensor) else value
    return torch.device("cpu")


class GeneratorState(TorchFunctionMode):
    """While a program is traced, lets every random operator read and replace one state."""

    def __init__(self, state: torch.Tensor) -> None:
        super().__init__()
        self.state = state

    def get(self) -> torch.Tensor:
        return self.state

    def set(self, state: torch.Tensor) -> None:
        """Go on from another state."""
        self.state = state

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not draws(func, args, kwargs):
            return func(*args, **kwargs)
        self.state, *outputs = draw(func, self.state, *args, **kwargs)
        if func._schema.is_mutable:
            return args[0].copy_(outputs[0])
        return tuple(outputs) if len(outputs) > 1 else outputs[0]
