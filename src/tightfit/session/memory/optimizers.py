"""The optimizers of some modules' parameters: found, not asked for; their state and its size."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tightfit.allocator.alive import alive
from tightfit.living import Living
from tightfit.session.memory.far_state import is_mapped
from tightfit.session.memory.forecast import StepNeeds, step_needs, tensors_in
from tightfit.torch_private.engine import hooks_of_gradient
from tightfit.units import rounded_up


class InBackward(Protocol):
    """Takes the steps of an optimizer inside of planned backwards."""

    @property
    def parameters(self) -> frozenset[int]:
        """Identities of the parameters whose gradients are freed there."""

    @property
    def keeps_state_far(self) -> bool:
        """Whether large tensors of the state are in far memory."""

    def is_of(self, optimizer: Any) -> bool:
        """Whether it takes the steps of an optimizer."""


class Optimizers:
    """The optimizers that hold any of some modules' parameters.

    `given`: that which the user has named; others are found when they exist. `granularity_bytes`:
    the unit that the device's allocator rounds to. `searches`: how often optimizers were searched.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], given: Any, granularity_bytes: int
    ) -> None:
        self._modules = modules
        self._granularity_bytes = granularity_bytes
        self._known: list[weakref.ref[Any]] = []
        self._given = given
        self._steps: InBackward | None = None
        self._holds_ours: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self.searches = 0
        self._needs: weakref.WeakKeyDictionary[Any, tuple[Any, StepNeeds | None]] = (
            weakref.WeakKeyDictionary()
        )
        self._planned: frozenset[int] | None = None  # parameters that captured steps train
        # Identities of parameters that had no gradient in any step
        self._without_gradient: weakref.WeakKeyDictionary[Any, frozenset[int]] = (
            weakref.WeakKeyDictionary()
        )

    def __iter__(self) -> Iterator[Any]:
        return iter(self._now())

    def _now(self) -> list[Any]:
        found = [] if self._given is None else [self._given]
        for reference in self._known:
            optimizer = reference()
            if optimizer is not None and optimizer is not self._given:
                found.append(optimizer)
        return found

    def find(self) -> None:
        """Find optimizers among all objects, at the first two calls of a step.

        Later ones make themselves known when they are to step.
        """
        if self.searches < 2 and not self._now():
            self.searches += 1
            own, kinds = self._own(), subclasses_of(torch.optim.Optimizer)
            for found in alive(kinds):
                if _holds_any(found, own):
                    self._add(found)

    def note(self, optimizer: Any) -> bool:
        """Note an optimizer that is to step; return whether it holds any of the parameters."""
        is_ours = self._holds_ours.get(optimizer)
        if is_ours is None:
            is_ours = self._holds_ours[optimizer] = _holds_any(optimizer, self._own())
            if is_ours:
                self._add(optimizer)
        return is_ours

    def _add(self, optimizer: Any) -> None:
        groups = optimizer.param_groups  # a wrapper shows those of its optimizer
        if all(other.param_groups is not groups for other in self):
            self._known.append(weakref.ref(optimizer))

    def note_gradients(self, optimizer: Any) -> frozenset[int]:
        """Note, and return, which parameters have no gradient as an optimizer begins to step."""
        groups = optimizer.param_groups
        skipped = frozenset(id(p) for group in groups for p in group["params"] if p.grad is None)
        known = self._without_gradient.get(optimizer, skipped)
        self._without_gradient[optimizer] = known & skipped
        return skipped

    def note_planned(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note parameters that a captured step has gradients for.

        Until an optimizer has stepped, its other parameters are expected to have none.
        """
        self._planned = (self._planned or frozenset()).union(map(id, parameters))

    @property
    def without_gradient(self) -> frozenset[int]:
        """Identities of parameters that are not expected to have a gradient."""
        optimizers = self._now()
        if not optimizers and self._planned is not None:
            return frozenset(map(id, self._own())) - self._planned
        return frozenset().union(*map(self._without_gradient_of, optimizers))

    def _without_gradient_of(self, optimizer: Any) -> frozenset[int]:
        known = self._without_gradient.get(optimizer)
        if self._planned is None:
            return known or frozenset()
        if known is None:
            own = frozenset(map(id, self._own()))
            known = own & {id(p) for group in optimizer.param_groups for p in group["params"]}
        return known - self._planned

    # -- state --------------------------------------------------------------------------------

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors of the own parameters' state that exist; not those in far memory."""
        own = {id(p) for p in self._own()}
        states = (s for o in self for p, s in o.state.items() if id(p) in own)
        return [t for state in states for t in tensors_in(state) if not is_mapped(t)]

    def has_state(self) -> bool:
        """Whether any of them has stepped."""
        return any(map(any, [optimizer.state.values() for optimizer in self._now()]))

    def coming_bytes(
        self,
        device: str,
        counted: Iterable[Any] = (),
        counted_parameters: Container[int] = frozenset(),
    ) -> int:
        """Return the bytes of state that will exist and does not yet.

        Which optimizer will come is unknown where none is there: Adam's two copies are assumed
        until two calls have passed without an optimizer. None is assumed where parameters have
        hooks, which may step them.

        `device`: ``"cpu"`` or ``"cuda"``. `counted`: optimizers whose state is counted elsewhere,
        as they may hold parameters of several models. `counted_parameters`: identities of
        parameters whose copies are counted elsewhere where copies are assumed.
        """
        if not self._now():
            may_come = self.searches < 2 and not self.has_hooks()
            return self._copies_bytes(counted_parameters) if may_come else 0
        elsewhere = set(map(id, counted))
        waiting = [o for o in self if id(o) not in elsewhere and not any(o.state.values())]
        return sum(self._predicted_bytes(optimizer, device) for optimizer in waiting)

    def _predicted_bytes(self, optimizer: Any, device: str) -> int:
        needs = self.step_needs(optimizer)
        if needs is not None:
            is_far = self.steps_in_backward(optimizer) and self._steps.keeps_state_far
            return needs.state_bytes(device) - (needs.large_bytes if is_far else 0)
        return self._copies_bytes()

    def _copies_bytes(self, counted: Container[int] = frozenset()) -> int:
        without = self.without_gradient
        trained = (
            p
            for p in self._own()
            if p.requires_grad and id(p) not in without and id(p) not in counted
        )
        return 2 * sum(rounded_up(p.nbytes, self._granularity_bytes) for p in trained)

    def has_hooks(self) -> bool:
        """Whether gradients of the own parameters have hooks, which may free them in a backward."""
        return any(hooks_of_gradient(p) for p in self._own() if p.requires_grad)

    def _own(self) -> list[nn.Parameter]:
        return parameters_of(self._modules)

    # -- steps --------------------------------------------------------------------------------

    def step_in_backward(self, steps: InBackward | None) -> None:
        """Have the steps of one of them taken in backward; None: of none."""
        self._steps = steps

    @property
    def stepped_in_backward(self) -> frozenset[int]:
        """Identities of the parameters whose gradients are freed in backward."""
        return self._steps.parameters if self._steps is not None else frozenset()

    def steps_in_backward(self, optimizer: Any) -> bool:
        """Whether the steps of an optimizer are ops of planned backwards."""
        return self._steps is not None and self._steps.is_of(optimizer)

    def step_needs(self, optimizer: Any) -> StepNeeds | None:
        """Return the memory that a step of an optimizer will take; None if that cannot be
        predicted."""
        without = self._without_gradient_of(optimizer)
        key = len(optimizer.state), any(optimizer.state.values()), without
        known = self._needs.get(optimizer)
        if known is None or known[0] != key:
            known = key, step_needs(optimizer, self._granularity_bytes, skipped=without)
            self._needs[optimizer] = known
        return known[1]

    def temporary_bytes(self) -> int:
        """Return the most that a step of any of them holds beyond state, as far as predicted.

        Those that step in backward take nothing after it.
        """
        needs = (self.step_needs(o) for o in self if not self.steps_in_backward(o))
        return max((n.temporary_bytes for n in needs if n is not None), default=0)


def parameters_of(modules: Mapping[str, nn.Module]) -> list[nn.Parameter]:
    return [p for m in modules.values() for p in m.parameters()]


def subclasses_of(kind: type) -> set[type]:
    """Return a class and all that derive from it."""
    return {kind}.union(*map(subclasses_of, kind.__subclasses__()))


def _holds_any(optimizer: Any, parameters: Iterable[nn.Parameter]) -> bool:
    own = {id(p) for p in parameters}
    return any(id(p) in own for group in optimizer.param_groups for p in group["params"])


class BeforeStep(Protocol):
    """A listener to the steps of all optimizers."""

    def before_step(self, optimizer: Any) -> None:
        """Note that an optimizer is about to step."""


class AfterStep(Protocol):
    """A listener to the steps of all optimizers."""

    def after_step(self, optimizer: Any) -> None:
        """Note that an optimizer has stepped."""


_BEFORE: Living[BeforeStep] = Living()
_AFTER: Living[AfterStep] = Living()


@functools.cache
def _listen() -> Any:
    """Watch the steps of all optimizers, from the first fitted callable on."""
    before = register_optimizer_step_pre_hook(_before_step)
    return before, register_optimizer_step_post_hook(_after_step)


def before_every_step(listener: BeforeStep) -> None:
    """Tell a listener of every optimizer that is about to step, for as long as it lives."""
    _listen()
    _BEFORE.add(listener)


def after_every_step(listener: AfterStep) -> None:
    """Tell a listener of every optimizer that has stepped, for as long as it lives."""
    _listen()
    _AFTER.add(listener)


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    for listener in _BEFORE.now():
        listener.before_step(optimizer)


def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    for listener in _AFTER.now():
        listener.after_step(optimizer)
