"""The bytes that are resident the whole step: gradients and optimizer state that exist or will."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tightfit.allocator.resident import granularity_of, resident_tensor_bytes
from tightfit.torch_private import core as private
from tightfit.torch_private.tools import cublas_workspace_bytes
from tightfit.units import rounded_up

__all__ = [
    "device_of_modules",
    "gradient_bytes",
    "lasting_bytes",
    "library_bytes",
    "new_gradient_bytes",
    "optimizer_state_bytes",
]


def gradient_bytes(modules: dict[str, nn.Module], granularity: int) -> int:
    """Return the bytes of the gradients that exist now."""
    gradients = [p.grad for m in modules.values() for p in m.parameters() if p.grad is not None]
    return resident_tensor_bytes(gradients, granularity)


def optimizer_state_bytes(
    optimizer: Any,
    modules: dict[str, nn.Module],
    granularity: int,
    device: str,
    *,
    own: bool = False,
) -> int:
    """Return the bytes of optimizer state that exist, or will after the first step.

    Without an optimizer two copies of the trainable parameters are assumed (Adam's).

    Parameters
    ----------
    own : bool
        Whether only the state of the modules' parameters counts; others count the rest.
    """
    trainable = {id(p): p for m in modules.values() for p in m.parameters() if p.requires_grad}
    copies = 2 * sum(rounded_up(p.nbytes, granularity) for p in trainable.values())
    if optimizer is None:
        return copies
    counted = set(trainable) if own else {id(p) for p in _parameters(optimizer)}
    states = [state for p, state in optimizer.state.items() if id(p) in counted or not own]
    if any(states):
        tensors = [t for state in states for t in _tensors(state)]
        return resident_tensor_bytes((t for t in tensors if t.device.type == device), granularity)
    predicted = _predict_state(optimizer, granularity, device, counted)
    return copies if predicted is None else predicted


def lasting_bytes(optimizer: Any, modules: dict[str, nn.Module], *, expected: bool) -> int:
    """Return what a model holds between its steps.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer or None
        Only the state of the model's own parameters counts: other models may share it.
    modules : dict of str to nn.Module
        The model.
    expected : bool
        Whether gradients and optimizer state count that do not exist yet but will.
    """
    members = [t for m in modules.values() for t in (*m.parameters(), *m.buffers())]
    device = device_of_modules(modules).type
    granularity = granularity_of(device)
    held = resident_tensor_bytes(members, granularity)
    gradients = gradient_bytes(modules, granularity)
    known = optimizer is not None and any(optimizer.state.values())
    if expected:
        gradients += new_gradient_bytes(modules, granularity)
    state = 0
    if expected or known:
        state = optimizer_state_bytes(optimizer, modules, granularity, device, own=True)
    return held + gradients + state


def device_of_modules(modules: dict[str, nn.Module]) -> torch.device:
    """Return the GPU that anything of the modules lies on, else the CPU."""
    members = (t for m in modules.values() for t in (*m.parameters(), *m.buffers()))
    return next((t.device for t in members if t.device.type == "cuda"), torch.device("cpu"))


def library_bytes(device: torch.device) -> int:
    """Return what libraries take of a device's allocator on their first use and keep: cuBLAS."""
    used = device.type == "cuda" and torch.cuda.is_available()  # not for shapes of a GPU elsewhere
    return cublas_workspace_bytes(device) if used else 0


def new_gradient_bytes(modules: dict[str, nn.Module], granularity: int) -> int:
    """Return the bytes of the gradients that do not exist yet but will."""
    trained = [p for m in modules.values() for p in m.parameters() if p.requires_grad]
    missing = [p for p in trained if p.grad is None]
    return resident_tensor_bytes(missing, granularity)


def _tensors(state: Any) -> list[torch.Tensor]:
    return [t for t in private.pytree.tree_leaves(state) if isinstance(t, torch.Tensor)]


def _parameters(optimizer: Any) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _predict_state(optimizer: Any, granularity: int, device: str, counted: set[int]) -> int | None:
    """Run one step of a like optimizer on fake parameters and measure its state."""
    try:
        with private.FakeTensorMode(allow_non_fake_inputs=True):
            groups = []
            for group in optimizer.param_groups:
                params = [p for p in group["params"] if p.requires_grad and id(p) in counted]
                fakes = [_fake_parameter(p) for p in params]
                groups.append({**group, "params": fakes, "foreach": False, "fused": False})
                groups[-1] = {k: v for k, v in groups[-1].items() if k in group}
            groups = [g for g in groups if g["params"]]
            twin = type(optimizer)(groups, **_arguments(optimizer))
            twin.step()
            tensors = [t for s in twin.state.values() for t in _tensors(s)]
            return sum(
                rounded_up(t.untyped_storage().nbytes(), granularity)
                for t in tensors
                if t.device.type == device
            )
    except Exception:  # an optimizer of any kind may fail on fakes in any way: assume two copies
        return None


def _fake_parameter(parameter: torch.Tensor) -> nn.Parameter:
    fake = nn.Parameter(torch.empty_like(parameter, requires_grad=False))
    fake.grad = torch.empty_like(fake)
    return fake


def _arguments(optimizer: Any) -> dict[str, Any]:
    defaults = dict(optimizer.defaults)
    for key in ("foreach", "fused", "capturable"):
        if key in defaults:
            defaults[key] = False
    return defaults
