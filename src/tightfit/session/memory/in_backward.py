"""The steps of an optimizer that are taken in backward, one parameter at a time."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch

from tightfit.allocator.alive import alive
from tightfit.allocator.resident import granularity_of
from tightfit.capture.stepping.steps import Stretch
from tightfit.errors import BadInput, TightfitError
from tightfit.execution.far.offload import Offload
from tightfit.execution.stepping import with_gradient
from tightfit.progress import announce
from tightfit.session.memory import stretches
from tightfit.session.memory.far_state import FarState
from tightfit.session.memory.forecast import StepNeeds, needs_of_parameter
from tightfit.session.memory.one_by_one import plain_step, refuse_unless_one_by_one
from tightfit.session.memory.optimizers import after_every_step, before_every_step, subclasses_of
from tightfit.torch_private.engine import hooks_of_gradient

_LARGE = 2  # times a stretch: the least workspace of steps that are taken in stretches
_SCALER_SEARCHES = 2  # calls at which gradient scalers are searched


class StepsInBackward:
    """Takes the steps of an optimizer inside of planned backwards, and watches the loop around.

    `optimizer`: its own code steps each parameter. `max_norm`: to which the norm of all gradients
    is clipped before any step. `offload`: where large tensors of its state are; None: in memory.
    Raises `BadInput` if its step of a parameter needs more than that parameter, its gradient and
    its state.
    """

    def __init__(
        self, optimizer: Any, max_norm: float | None = None, offload: Offload | None = None
    ) -> None:
        refuse_unless_one_by_one(optimizer)
        self._far = FarState(optimizer, offload) if offload is not None else None
        self.optimizer = optimizer
        self.max_norm = max_norm
        self._taken: dict[int, tuple[str, weakref.ref[torch.Tensor]]] = {}
        self._needs: dict[Any, StepNeeds] = {}
        self._stretches: dict[Any, Stretch | None] = {}
        self._settings: list[dict[str, Any]] | None = None  # with which parameters were stepped
        self._group_numbers: dict[int, int] = {}
        self._announced = False
        self._scaler_searches = 0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self.stretch(parameter)  # tried now: within a limit there may be no room for it
        before_every_step(self)
        after_every_step(self)

    @property
    def name(self) -> str:
        return type(self.optimizer).__name__

    @property
    def keeps_state_far(self) -> bool:
        return self._far is not None

    def is_of(self, optimizer: Any) -> bool:
        return optimizer.param_groups is self.optimizer.param_groups

    @property
    def parameters(self) -> frozenset[int]:
        taken = [parameter for _, parameter in self._present()]
        every = (p for group in self.optimizer.param_groups for p in group["params"])
        return frozenset(map(id, taken or every))

    # -- questions of plans -------------------------------------------------------------------

    def takes(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._places()

    def needs(self, parameter: torch.Tensor) -> tuple[int, int]:
        """Return the bytes of a parameter's state, and the workspace of its step.

        Raises `BadInput` if that cannot be predicted.
        """
        needs = self._predicted(parameter)
        temporary_bytes = needs.temporary_bytes
        if self._far is not None:  # its first step makes the state
            stretch = self.stretch(parameter)
            whole_bytes = needs.temporary_bytes + needs.large_bytes
            first_bytes = whole_bytes if stretch is None else stretch.workspace_bytes
            temporary_bytes = max(temporary_bytes, first_bytes)
        return needs.state_bytes(parameter.device.type), temporary_bytes

    def _predicted(self, parameter: torch.Tensor) -> StepNeeds:
        """Return the memory that a step of a parameter takes."""
        where = parameter.dtype, parameter.device
        key = self._places()[id(parameter)], parameter.shape, parameter.stride(), *where
        if key not in self._needs:
            needs = self._needed(parameter)
            if needs is None:
                raise BadInput(
                    f"the memory of {self.name} for a step of one parameter cannot be predicted, "
                    "so no plan can have room for it. Way out: fit without update_in_backward"
                )
            self._needs[key] = needs
        return self._needs[key]

    def stretch(self, parameter: torch.Tensor) -> Stretch | None:
        least_bytes = _LARGE * stretches.STRETCH * parameter.element_size()
        if self._predicted(parameter).temporary_bytes < least_bytes:
            return None
        number = self._places()[id(parameter)]
        key = number, parameter.dim(), parameter.dtype, parameter.device
        if key not in self._stretches:
            self._stretches[key] = self._tried(self.optimizer.param_groups[number], parameter)
        return self._stretches[key]

    def _tried(self, group: dict[str, Any], parameter: torch.Tensor) -> Stretch | None:
        elements = stretches.STRETCH
        needs = self._needed(parameter, elements)
        if needs is None or not stretches.has_same_bits(self.optimizer, group, parameter):
            return None
        # at first, its part of the state is made before it is put into the whole
        state_bytes = needs.state_bytes(parameter.device.type)
        return Stretch(elements, needs.temporary_bytes + state_bytes)

    def _needed(self, parameter: torch.Tensor, elements: int | None = None) -> StepNeeds | None:
        """Return the memory that steps of a parameter take, or of some of its elements."""
        group = self.optimizer.param_groups[self._places()[id(parameter)]]
        granularity = granularity_of(parameter.device.type)
        return needs_of_parameter(self.optimizer, group, parameter, granularity, elements)

    def take(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._taken |= {id(p): (name, weakref.ref(p)) for name, p in parameters.items()}

    # -- steps --------------------------------------------------------------------------------

    def before_forward(self) -> None:
        """Raise if the loop does something that needs a step after backward.

        Raises `TightfitError`: names the cause, and a way out; nothing has been changed then.
        """
        if self._settings is not None:
            self._refuse(
                "a second call after a backward that has stepped, without optimizer.step() "
                "between them: gradients cannot be accumulated. Way out: one backward for each "
                "optimizer.step() (which is still called, for schedulers and hooks), or fit "
                "without update_in_backward"
            )
        self._refuse_scalers()
        places = self._places()
        for name, parameter in self._present():
            if id(parameter) not in places:
                self._refuse(f"{name} has left the optimizer. Way out: fit the model again")
            if hooks_of_gradient(parameter):
                self._refuse(
                    f"{name} has a hook on its gradient, which is never in {name}.grad. Way out: "
                    "remove the hook, or fit without update_in_backward"
                )
        self.before_backward()

    def before_backward(self) -> None:
        """Raise if a parameter has a gradient already, which the step would leave out."""
        for name, parameter in self._present():
            if parameter.grad is not None:
                self._refuse(
                    f"{name}.grad is there before backward: gradients cannot be accumulated. Way "
                    "out: optimizer.zero_grad() before, or fit without update_in_backward"
                )

    def step(
        self, parameter: torch.Tensor, gradient: torch.Tensor, elements: int | None = None
    ) -> None:
        """Take the step of one parameter: the optimizer's own code, that finds only this parameter.

        `elements`: how many at a time; None: all at once.
        """
        if self._settings is None:
            self._settings = _settings_of(self.optimizer)
            self._group_numbers = self._places()
        group = self.optimizer.param_groups[self._group_numbers[id(parameter)]]
        if self._far is not None and not self.optimizer.state.get(parameter):
            stretch = self.stretch(parameter)  # its state is made where it stays
            elements = stretch.elements if stretch is not None else elements
        if elements is not None:
            made = self._far.empty_like if self._far is not None else stretches.in_memory
            args = self.optimizer, group, parameter, gradient, elements
            stretches.step_in_stretches(*args, made)
        else:
            with with_gradient(parameter, gradient):
                plain_step(self.optimizer, [{**group, "params": [parameter]}])
        if self._far is not None:
            self._far.keep(self.optimizer.state.get(parameter))

    def move_state(self) -> None:
        """Move state that exists to far memory, if it is kept there."""
        if self._far is not None:
            self._far.keep_all()

    @cached_property  # asked for in every step
    def far_bytes(self) -> int:
        """The bytes of state that are in far memory, or will be."""
        if self._far is None:
            return 0
        groups = self.optimizer.param_groups
        return sum(self._predicted(p).large_bytes for group in groups for p in group["params"])

    def after_step(self, optimizer: Any) -> None:
        """Note that the loop has stepped: its closure may have run the backward meanwhile."""
        self.before_step(optimizer)

    def before_step(self, optimizer: Any) -> None:
        """Note that the loop steps: parameters stepped in backward have no gradient and stay.

        Raises `TightfitError` if the loop has changed a setting of the step, or a gradient came
        from outside the plan.
        """
        if not self.is_of(optimizer) or self._settings is None:
            return
        before, self._settings = self._settings, None
        if before != _settings_of(optimizer):
            self._refuse(
                "the optimizer's settings (its learning rate, say) were changed between backward, "
                "which has stepped with the old ones, and optimizer.step(). Way out: change them "
                "before the forward, as a scheduler does that steps after the optimizer"
            )
        late = next((name for name, p in self._present() if p.grad is not None), None)
        if late is not None:
            self._refuse(
                f"a part of the gradient of {late} came from outside the plan, after backward had "
                "stepped with the rest. Way out: put all of the loss into the plan "
                "(tightfit.step), or fit without update_in_backward"
            )
        if not self._announced:
            self._announced = True
            announce(
                f"{self.name} has stepped {len(self._taken)} parameters in backward, where their "
                "gradients were freed: optimizer.step() and zero_grad() do nothing for them, and "
                ".grad is None after backward (clip_grad_norm= clips)"
            )

    # -- looking ------------------------------------------------------------------------------

    def _places(self) -> dict[int, int]:
        """Return in which group each parameter is, by its identity."""
        groups = enumerate(self.optimizer.param_groups)
        return {id(p): number for number, group in groups for p in group["params"]}

    def _present(self) -> list[tuple[str, torch.Tensor]]:
        """Return the parameters that are stepped in backward, as far as they are there."""
        found = ((name, reference()) for name, reference in self._taken.values())
        return [(name, p) for name, p in found if p is not None]

    def _refuse_scalers(self) -> None:
        if self._scaler_searches < _SCALER_SEARCHES:
            self._scaler_searches += 1
            if any(s.is_enabled() for s in alive(subclasses_of(torch.amp.GradScaler))):
                self._refuse(
                    "there is a GradScaler, which looks for infinities in all gradients before "
                    "any step. Way out: bfloat16, which needs none, or fit without "
                    "update_in_backward"
                )

    def _refuse(self, reason: str) -> None:
        raise TightfitError(f"update_in_backward=True with {self.name}: {reason}")


def _settings_of(optimizer: Any) -> list[dict[str, Any]]:
    """Return settings of an optimizer's steps other than parameters, gradients and state."""
    return [
        {key: _plain(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def _plain(value: Any) -> Any:
    """Return a setting that does not change later: a number in place of a tensor."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
