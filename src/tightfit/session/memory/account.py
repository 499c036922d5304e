"""What is resident around the steps of a fitted callable, and what was learned of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from tightfit.allocator.resident import granularity_of, resident_tensor_bytes
from tightfit.session.processes import Replicas
from tightfit.torch_private import core as private
from tightfit.torch_private.tools import cublas_workspace_bytes
from tightfit.units import rounded_up

__all__ = ["Account", "device_of_modules", "library_bytes", "optimizer_state_bytes"]


class Account:
    """What a fitted callable holds between its steps: the one place that counts it.

    Parameters
    ----------
    modules : mapping of str to nn.Module
        The modules whose parameters it uses.
    optimizer : torch.optim.Optimizer or None
        Tells the size of its state; without it two copies of the trainable parameters are
        assumed (Adam's) until a step has shown what it leaves behind.

    Attributes
    ----------
    device : torch.device
        The GPU that anything of the modules lies on, else the CPU.
    replicas : Replicas or None
        The DistributedDataParallel around.
    """

    def __init__(self, modules: Mapping[str, nn.Module], optimizer: Any) -> None:
        self.modules = modules
        self.optimizer = optimizer
        self.replicas: Replicas | None = None
        self.device = device_of_modules(modules)
        self._shares_budget = False
        self._seen_state_bytes: int | None = None
        self._state_bytes: int | None = None

    # -- what is there ------------------------------------------------------------------------

    @property
    def granularity_bytes(self) -> int:
        """What the device's allocator rounds to."""
        return granularity_of(self.device.type)

    def gradient_bytes(self) -> int:
        """Return the bytes of the gradients that exist now."""
        gradients = [p.grad for p in _parameters_of(self.modules) if p.grad is not None]
        return resident_tensor_bytes(gradients, self.granularity_bytes)

    def new_gradient_bytes(self) -> int:
        """Return the bytes of the gradients that do not exist yet but will."""
        return new_gradient_bytes(self.modules, self.granularity_bytes)

    def bucket_bytes(self) -> int:
        """Return the bytes of the buckets that gradients go into, if ranks train together."""
        return self.replicas.bucket_bytes(self.granularity_bytes) if self.replicas else 0

    def held_gradient_bytes(self) -> int:
        """Return the bytes of the gradients that exist and of the buckets they go into."""
        return self.gradient_bytes() + self.bucket_bytes()

    def state_bytes(self, *, settled: bool) -> int:
        """Return the optimizer's state as plans count it: there, predicted, or seen to appear.

        Parameters
        ----------
        settled : bool
            Whether enough steps were taken for all of it to be there.
        """
        if self.optimizer is None and self._seen_state_bytes is not None:
            return self._seen_state_bytes
        if self._state_bytes is None or not settled:
            self._state_bytes = self._optimizer_state_bytes(own=self._shares_budget)
        return self._state_bytes

    def existing_state_bytes(self, *, settled: bool) -> int:
        """Return the optimizer's state that is there now, as far as it is known."""
        if self.optimizer is None:
            return self._seen_state_bytes or 0
        return self.state_bytes(settled=settled) if self._has_state else 0

    def coming_state_bytes(self) -> int:
        """Return the optimizer's state that will be there and is not yet."""
        if self.optimizer is None and self._seen_state_bytes is not None:
            return 0
        return 0 if self._has_state else self._optimizer_state_bytes(own=True)

    def lasting_bytes(self, *, expected: bool) -> int:
        """Return what is held between steps: of an optimizer the state of the own parameters.

        Parameters
        ----------
        expected : bool
            Whether gradients and optimizer state count that do not exist yet but will.
        """
        members = [t for m in self.modules.values() for t in (*m.parameters(), *m.buffers())]
        held = resident_tensor_bytes(members, self.granularity_bytes) + self.gradient_bytes()
        if expected:
            held += self.new_gradient_bytes()
        if expected or self._has_state:
            held += self._optimizer_state_bytes(own=True)
        return held

    def resident_bytes(self, inputs: Iterable[Any]) -> int:
        """Return all that is resident now, the inputs of a call, buckets and libraries included."""
        seen = self._seen_state_bytes or 0 if self.optimizer is None else 0
        held = resident_tensor_bytes(inputs, self.granularity_bytes) + seen
        held += library_bytes(self.device) + self.bucket_bytes()
        return held + self.lasting_bytes(expected=False)

    # -- learning -----------------------------------------------------------------------------

    def locate(self) -> None:
        """Look anew where the modules lie: they may have been moved."""
        self.device = device_of_modules(self.modules)

    def share_budget(self) -> None:
        """Count of the optimizer the state of the own parameters only: others count the rest."""
        self._shares_budget = True

    def join(self, replicas: Replicas) -> None:
        """Count the buckets of the DistributedDataParallel around, too."""
        self.replicas = replicas

    def appeared_bytes(self, grown_bytes: int) -> int:
        """Return what of the growth over a step is neither a gradient nor a bucket of one."""
        grown = grown_bytes - self.gradient_bytes()
        if self.replicas is not None:  # what gradients are views of was there before the step
            grown += self.replicas.viewed_bytes(self.granularity_bytes)
        return max(0, grown)

    def learn_state(self, appeared_bytes: int) -> None:
        """Take what a step left behind for the optimizer's state: nobody told its size."""
        self._seen_state_bytes = max(self._seen_state_bytes or 0, appeared_bytes)

    # -- the optimizer ------------------------------------------------------------------------

    @property
    def _has_state(self) -> bool:
        return self.optimizer is not None and any(self.optimizer.state.values())

    def _optimizer_state_bytes(self, *, own: bool) -> int:
        return optimizer_state_bytes(
            self.optimizer, self.modules, self.granularity_bytes, self.device.type, own=own
        )


def device_of_modules(modules: Mapping[str, nn.Module]) -> torch.device:
    """Return the GPU that anything of the modules lies on, else the CPU."""
    members = (t for m in modules.values() for t in (*m.parameters(), *m.buffers()))
    return next((t.device for t in members if t.device.type == "cuda"), torch.device("cpu"))


def library_bytes(device: torch.device) -> int:
    """Return what libraries take of a device's allocator on their first use and keep: cuBLAS."""
    used = device.type == "cuda" and torch.cuda.is_available()  # not for shapes of a GPU elsewhere
    return cublas_workspace_bytes(device) if used else 0


def new_gradient_bytes(modules: Mapping[str, nn.Module], granularity: int) -> int:
    """Return the bytes of the gradients that do not exist yet but will."""
    trained = [p for p in _parameters_of(modules) if p.requires_grad]
    return resident_tensor_bytes([p for p in trained if p.grad is None], granularity)


def optimizer_state_bytes(
    optimizer: Any,
    modules: Mapping[str, nn.Module],
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
    trainable = {id(p): p for p in _parameters_of(modules) if p.requires_grad}
    copies = 2 * sum(rounded_up(p.nbytes, granularity) for p in trainable.values())
    if optimizer is None:
        return copies
    counted = set(trainable) if own else {id(p) for p in _parameters_in(optimizer)}
    states = [state for p, state in optimizer.state.items() if id(p) in counted or not own]
    if any(states):
        tensors = [t for state in states for t in _tensors(state)]
        return resident_tensor_bytes((t for t in tensors if t.device.type == device), granularity)
    predicted = _predict_state(optimizer, granularity, device, counted)
    return copies if predicted is None else predicted


def _parameters_of(modules: Mapping[str, nn.Module]) -> list[nn.Parameter]:
    return [p for m in modules.values() for p in m.parameters()]


def _tensors(state: Any) -> list[torch.Tensor]:
    return [t for t in private.pytree.tree_leaves(state) if isinstance(t, torch.Tensor)]


def _parameters_in(optimizer: Any) -> list[torch.Tensor]:
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
