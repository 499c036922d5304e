"""A plan for a budget in which no plan has room for all expected memory.

Before a step has run, the bytes of a loss outside and of the optimizer's state are unknown. So is
whether memory held now is freed before the backward. Where no plan has room for the worst case, the
step runs by a plan that leaves room for less. The limit still holds: the allocator refuses requests
above it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tightfit.capture.captured import Captured
from tightfit.errors import InfeasibleBudget
from tightfit.graph.forward import forward_of, outputs_freed
from tightfit.graph.ir import Graph
from tightfit.graph.liveness import eager_peak_bytes
from tightfit.plan.assemble import everything_kept
from tightfit.plan.plan import Gradients, Plan
from tightfit.plan.simulate import simulate
from tightfit.planners.base import Limits
from tightfit.planners.questions.infeasible import NoPlan
from tightfit.planners.questions.minimum import proven_least_bytes
from tightfit.session.memory.account import Account
from tightfit.session.memory.held_at_call import HeldAtCall
from tightfit.session.memory.surroundings import (
    Surroundings,
    expected_outside_bytes,
    forward_output_bytes,
)
from tightfit.session.options import Options
from tightfit.session.step.holding import forward_peak_bytes, holding_of
from tightfit.session.whole.specialisation import Planned, Specialisation
from tightfit.units import format_bytes

_QUICKLY = Limits(seconds=1.0)
_PREDICTED = 1.15  # of a predicted workspace: it may be so large
_NEARLY = 1.03  # of the budget: plain PyTorch may need so much less than estimated
# Holders of expected memory, for messages
_USER_CODE = "memory of user code between forward and backward"
_STATE = "optimizer state that is to come"
_GRADIENTS = "gradients that exist now"
_OTHER = "other memory held now"
_SHARING = "memory of others within the budget"
_WORKSPACES = "workspaces that there is no room to measure"


class FitsEagerly(Exception):
    """No plan fits, and plain PyTorch may: its estimated peak is about the budget.

    `error`: to be raised if it does not fit either. `has_backward`: whether the backward may fit,
    too; if not, only the forward with no saved tensors, as the backward may never come.
    """

    def __init__(self, error: InfeasibleBudget, *, has_backward: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.has_backward = has_backward


@dataclass(frozen=True)
class NeededBudget:
    """The least budget that was found for a step."""

    graph: Graph  # the step with memory resident around it
    plan: Plan
    needed_bytes: int  # the budget


@dataclass(frozen=True)
class ReleasingStep:
    """A step between whose forward and backward other memory is released."""

    surroundings: Surroundings  # of its backward
    released_bytes: int  # held in its forward in addition

    def least(self, spec: Specialisation, limits: Limits = _QUICKLY) -> NeededBudget:
        """Return the least budget that was found for it."""
        graph = self._graph(spec)
        least = spec.least_budgets.find(graph, self.surroundings.gradients, limits)
        plans = [least.plan]
        if self._held(graph, least.plan) > least.found_bytes:  # other plans hold less in it
            a_little_more = self.surroundings.outside_bytes * 9 // 8
            for outside_bytes in (a_little_more, plans[0].budget_bytes):
                plans.append(
                    _least_kept_plan(spec, graph, self.surroundings.gradients, outside_bytes)
                )
        held = [self._held(graph, plan) for plan in plans]
        best = held.index(min(held))
        return NeededBudget(graph, plans[best], held[best])

    def plain_bytes(self, spec: Specialisation) -> int:
        """Return the peak of plain PyTorch."""
        graph = self._graph(spec)
        return self._held(graph, everything_kept(graph, self.surroundings.gradients))

    def fits_with(self, planned: Planned, budget_bytes: int) -> bool:
        """Whether the forward of a plan and the memory to be released fit a budget together."""
        assert planned.outcome.plan is not None
        forward_bytes = forward_peak_bytes(planned.graph, planned.outcome.plan)
        return forward_bytes + self.released_bytes <= budget_bytes

    def before_user_code(self, outside_bytes: int) -> ReleasingStep:
        """Return the same step, with all of that memory released before the peak of user code."""
        outside_bytes = max(outside_bytes, self.released_bytes)
        return replace(self, surroundings=self.surroundings.with_outside(outside_bytes))

    def _graph(self, spec: Specialisation) -> Graph:
        return self.surroundings.graph_of(spec.with_postponed.with_predicted(_PREDICTED))

    def _held(self, graph: Graph, plan: Plan) -> int:
        """Return the peak of a plan, with the memory to be released."""
        forward_bytes = forward_peak_bytes(graph, plan)
        return max(simulate(graph, plan).peak_bytes, forward_bytes + self.released_bytes)


@dataclass(frozen=True)
class LessExpected:
    """A step with less memory around it than may come."""

    surroundings: Surroundings  # with all that may come
    present: Surroundings  # without memory that is only expected
    # Before the backward, gradients are released that an optimizer has used
    used_released: ReleasingStep
    likely: ReleasingStep  # also the outputs of the call before
    all_released: ReleasingStep  # all gradients that exist, and all other memory held now
    used_gradient_bytes: int  # gradients that exist and that an optimizer has used
    outside_bytes: int  # expected memory of user code between forward and backward
    held_bytes: Mapping[str, int]  # expected bytes other than the step's, by holder
    # Inputs that exist already and will not be made again in later steps
    lasting_inputs: tuple[int, ...]
    may_be_alone: bool = False  # whether its backward may never come
    may_free: bool = False  # whether hooks may free gradients in the backward

    def proven_bytes(self, spec: Specialisation) -> int | None:
        """Return the least budget without expected memory; None: no memory is only expected.

        Outputs that the caller may hold until the backward has ended are expected memory, too.
        """
        is_open = self.may_be_alone or spec.may_receive_less or self.may_free
        surroundings = self._certain.graph_of(spec.with_postponed.with_predicted(0))
        known = outputs_freed(surroundings)
        if not (any(self.held_bytes.values()) or is_open or known is not surroundings):
            return None
        if self.may_be_alone or spec.may_receive_less:
            known = forward_of(known)
        return proven_least_bytes(known, self._certain.gradients, _QUICKLY)

    def held_by(self, step: ReleasingStep) -> Mapping[str, int]:
        """Return expected bytes around a step, by holder."""
        coming_bytes = self.surroundings.others_bytes - self.present.others_bytes
        return {
            _USER_CODE: self.outside_bytes,
            _STATE: self.surroundings.state_bytes - self.present.state_bytes,
            _GRADIENTS: step.surroundings.gradient_bytes,
            _OTHER: step.surroundings.others_bytes - coming_bytes,
            "memory that is freed before the backward": step.released_bytes,
            _SHARING: coming_bytes,
            _WORKSPACES: self.held_bytes[_WORKSPACES],
        }

    def likely_to_come(self) -> ReleasingStep:
        """Return the step as later steps are expected to be, with the optimizer's state."""
        surroundings = replace(
            self.likely.surroundings,
            state_bytes=self.surroundings.state_bytes,
            others_bytes=self.surroundings.others_bytes
            - self.present.others_bytes
            + self.likely.surroundings.others_bytes,
            outside_bytes=max(self.outside_bytes, self.likely.surroundings.outside_bytes),
            earlier_inputs=self.lasting_inputs,
        )
        return replace(self.likely, surroundings=surroundings)

    def without_release(self) -> LessExpected:
        """Return the same as if no memory held now were freed before the backward."""
        return replace(self, likely=ReleasingStep(self.present, 0), used_gradient_bytes=0)

    def holders_text(self) -> str:
        """Return the memory that no plan has room for, as text."""
        amounts = [
            f"{format_bytes(n)} of {holder}" for holder, n in self.held_bytes.items() if n > 0
        ]
        return " and ".join(amounts) or "memory of its last backward"

    def planned(
        self,
        spec: Specialisation,
        plan: Callable[[Surroundings, Plan], Planned],
        plan_as: Callable[[Surroundings, Plan], Planned | None],
        budget_bytes: int,
    ) -> Planned | None:
        """Return a plan that leaves as much room as possible; None: no plan fits.

        `plan`: plans the step for some surroundings, given a known plan. `plan_as`: returns a given
        plan for some surroundings, ready to run, if it is valid. `budget_bytes`: the limit at any
        time.
        """

        if self.may_free:
            planned = self._plain_plan(spec, plan_as)
            if planned is not None:
                return planned
        for step in self._candidates(spec):
            graph = step.surroundings.graph_of(spec.with_postponed)
            if graph.constant_bytes > step.surroundings.budget_bytes:
                continue
            for planned in self._attempts(spec, step, plan, plan_as):
                if planned is not None and step.fits_with(planned, budget_bytes):
                    return planned
        return None

    def _plain_plan(
        self, spec: Specialisation, plan_as: Callable[[Surroundings, Plan], Planned | None]
    ) -> Planned | None:
        """Return the plan of plain PyTorch if it fits where hooks free gradients; else None.

        Its order is plain PyTorch's: other plans may read a weight after its gradient is handed
        over, and a hook may have changed the weight by then.
        """
        for surroundings in (self.if_freed(self.present), *self._as_plain(spec)):
            graph = surroundings.graph_of(spec.with_postponed)
            planned = plan_as(surroundings, everything_kept(graph, surroundings.gradients))
            if planned is not None:
                return planned
        return None

    def _as_plain(self, spec: Specialisation) -> Iterator[Surroundings]:
        """Yield surroundings for plain PyTorch's way, if it fits once outputs are freed."""
        least, peak_bytes = self._certain, self.plain_bytes(spec)
        returned_bytes = spec.captured.graph.returned_bytes
        if least.budget_bytes < peak_bytes <= least.budget_bytes + returned_bytes:
            yield replace(least, budget_bytes=peak_bytes)

    def _attempts(
        self,
        spec: Specialisation,
        step: ReleasingStep,
        plan: Callable[[Surroundings, Plan], Planned],
        plan_as: Callable[[Surroundings, Plan], Planned | None],
    ) -> Iterator[Planned | None]:
        """Yield plans of a step, whose forwards may hold too much; None for an invalid plan."""
        surroundings = step.surroundings
        for known in (*spec.running, *spec.known.all()):
            yield plan_as(surroundings, known)
        graph = surroundings.graph_of(spec.with_postponed)
        found = spec.least_budgets.within(
            graph, surroundings.gradients, _QUICKLY, surroundings.budget_bytes
        )
        if found is None:
            return
        if spec.postponed is None:
            spec.known.remember(found)
        for each, known in (self._most_room(spec, surroundings), (surroundings, found)):
            with contextlib.suppress(InfeasibleBudget):
                yield plan(each, known)
            yield plan_as(each, known)
        if step.released_bytes:  # all forwards held too much: try a plan that holds less in it
            yield plan_as(surroundings, step.least(spec).plan)

    def _most_room(
        self, spec: Specialisation, surroundings: Surroundings
    ) -> tuple[Surroundings, Plan]:
        """Return surroundings with as much room for user code as possible, and a plan for them."""
        graph = surroundings.graph_of(spec.with_postponed)
        least_kept = _least_kept_plan(
            spec, graph, surroundings.gradients, surroundings.budget_bytes
        )
        held = holding_of(graph.with_outside(0), least_kept)
        room_bytes = surroundings.budget_bytes - graph.constant_bytes - held.staying_bytes
        room_bytes = max(surroundings.outside_bytes, min(self.outside_bytes, room_bytes))
        return surroundings.with_outside(room_bytes), least_kept

    def _candidates(self, spec: Specialisation) -> Iterator[ReleasingStep]:
        """Yield steps to plan, with ever more memory that is released before the backward."""
        if not spec.user_code.is_known:  # the loop may hold it until the backward has ended
            staying_bytes = self.present.others_bytes + self.outside_bytes
            yield ReleasingStep(replace(self.present, others_bytes=staying_bytes), 0)
        if self.present != self.surroundings:  # for that none was found
            yield ReleasingStep(self.present, 0)
        passed_bytes = 0
        for step in (self.used_released, self.likely, self.all_released):
            if step.released_bytes > passed_bytes:
                passed_bytes = step.released_bytes
                yield step
                yield step.before_user_code(self.present.outside_bytes)
        if not self.may_free:  # else that was tried, in the order of plain PyTorch
            for plain in self._as_plain(spec):
                yield ReleasingStep(plain, self.all_released.released_bytes)

    def plain_bytes(self, spec: Specialisation) -> int:
        """Return the peak of plain PyTorch in the step, if all other memory is released."""
        return _plain_bytes(spec, self._certain)

    def forward_alone_bytes(self, spec: Specialisation) -> int:
        """Return the peak of the forward without saved tensors."""
        return eager_peak_bytes(forward_of(self.present.graph_of(spec.captured)))

    def plain_bytes_now(self, spec: Specialisation) -> int:
        """Return the peak of plain PyTorch in the step with all that is held now."""
        return _plain_bytes(spec, self.present)

    @property
    def _certain(self) -> Surroundings:
        """Memory around every backward, even if user code holds none."""
        return self.if_freed(replace(self.all_released.surroundings, outside_bytes=0))

    def if_freed(self, surroundings: Surroundings) -> Surroundings:
        """Return surroundings as if hooks freed gradients, where there are any."""
        return replace(surroundings, gradients="accumulated") if self.may_free else surroundings


def surroundings_of(
    spec: Specialisation, inputs: Sequence[Any], account: Account, options: Options
) -> Surroundings:
    """Return memory resident around a step now, with all of the budget for the step."""
    held = account.held_at_call(inputs, options.others_in_budget(account), spec.input_bytes)
    usable_bytes = options.usable_bytes
    surroundings = Surroundings(
        gradients=_gradients(spec.captured, inputs, account),
        gradient_bytes=held.gradient_bytes,
        state_bytes=held.state_bytes + held.coming_bytes,
        outside_bytes=spec.user_code.planned_bytes,
        others_bytes=held.others_bytes + held.others_coming_bytes + spec.surplus_bytes,
        budget_bytes=usable_bytes - options.left_bytes,
        whole_bytes=usable_bytes,
        far=options.far_on(account.device),
        earlier_inputs=held.earlier_inputs,
    )
    return surroundings.with_lives(spec.lives)


def _gradients(captured: Captured, inputs: Sequence[Any], account: Account) -> Gradients:
    """Return whether gradients are fresh and outlive their hand-over, or are accumulated."""
    missing = (
        owner
        for _, position in captured.joint.gradients
        if not (owner := inputs[position]).is_leaf or owner.grad is None
    )
    if account.replicas is None:
        return "accumulated" if next(missing, None) is None else "fresh"
    owners = list(missing)
    return "fresh" if owners and not account.replicas.takes(owners) else "accumulated"


def without_expected(surroundings: Surroundings, held: HeldAtCall) -> Surroundings:
    own = {"state_bytes": held.state_bytes, "others_bytes": held.others_bytes, "part": 1.0}
    return replace(surroundings, **own)


def less_expected(
    spec: Specialisation,
    surroundings: Surroundings,
    account: Account,
    held: HeldAtCall,
    options: Options,
) -> LessExpected:
    coming_bytes = held.coming_bytes
    made_bytes = coming_bytes if options.steps is not None else 0  # in this very backward
    present = replace(
        without_expected(surroundings, held),
        outside_bytes=spec.user_code.measured_bytes or 0,
        state_bytes=held.state_bytes + made_bytes,
        budget_bytes=options.planned_bytes,
    )
    used_bytes = min(held.gradient_bytes, account.since.used_bytes)
    returned_bytes = min(held.others_bytes, account.since.returned_bytes(account.tally) or 0)
    used_released = without(present, others_bytes=0, gradient_bytes=used_bytes)
    likely = without(present, others_bytes=returned_bytes, gradient_bytes=used_bytes)
    every = without(present, others_bytes=held.others_bytes, gradient_bytes=held.gradient_bytes)
    held_bytes = {
        _USER_CODE: surroundings.outside_bytes,
        _STATE: coming_bytes - made_bytes,
        _GRADIENTS: held.gradient_bytes,
        _OTHER: held.others_bytes,
        _SHARING: held.others_coming_bytes,
        "memory of other calls": options.planned_bytes - surroundings.budget_bytes,
        _WORKSPACES: spec.with_postponed.predicted_bytes,
    }
    outside_bytes = spec.user_code.measured_bytes
    if outside_bytes is None:
        outside_bytes = expected_outside_bytes(spec.captured)
    return LessExpected(
        surroundings,
        present,
        used_released,
        likely,
        every,
        used_gradient_bytes=used_bytes,
        outside_bytes=outside_bytes,
        held_bytes=held_bytes,
        lasting_inputs=held.earlier_parts,
        may_free=spec.lives is None and account.optimizers.has_hooks(),
    )


def without(surroundings: Surroundings, *, others_bytes: int, gradient_bytes: int) -> ReleasingStep:
    """Return a step before whose backward some memory held now is released.

    Many loops clear gradients after the loss: user code then holds its memory in addition to them.

    `others_bytes`, `gradient_bytes`: released bytes.
    """
    released_bytes = others_bytes + gradient_bytes
    left = replace(
        surroundings,
        gradients="fresh" if gradient_bytes else surroundings.gradients,
        gradient_bytes=surroundings.gradient_bytes - gradient_bytes,
        others_bytes=surroundings.others_bytes - others_bytes,
        outside_bytes=max(surroundings.outside_bytes + gradient_bytes, released_bytes),
    )
    return ReleasingStep(left, released_bytes)


def _plain_bytes(spec: Specialisation, surroundings: Surroundings) -> int:
    """Return the peak of plain PyTorch in a step, as estimated from its graph."""
    return eager_peak_bytes(surroundings.graph_of(spec.captured), gradients=surroundings.gradients)


def with_more_room(spec: Specialisation, surroundings: Surroundings) -> Iterator[Surroundings]:
    """Yield surroundings with ever less additional memory, for a first plan.

    User code may hold its memory until the backward has ended: all of it, or as much as the
    outputs. In later steps, the outputs of the step before may be held while a forward runs.
    """
    output_bytes = forward_output_bytes(spec.captured)
    less_bytes = surroundings.budget_bytes - output_bytes
    staying = _with_staying(surroundings, surroundings.outside_bytes)
    yield replace(staying, budget_bytes=less_bytes)
    yield replace(surroundings, budget_bytes=less_bytes)
    yield staying
    yield _with_staying(surroundings, min(output_bytes, surroundings.outside_bytes))


def _with_staying(surroundings: Surroundings, held_bytes: int) -> Surroundings:
    """Return surroundings in which user code holds so much until the backward has ended."""
    staying = surroundings.with_others(surroundings.others_bytes + held_bytes)
    return staying.with_outside(surroundings.outside_bytes - held_bytes)


def _least_kept_plan(
    spec: Specialisation, graph: Graph, gradients: Gradients, outside_bytes: int
) -> Plan:
    """Return a plan that keeps little between forward and backward.

    It is the least plan if user code held so much between them that kept bytes decide the peak.
    """
    crowded = graph.with_outside(outside_bytes)
    return spec.least_budgets.find(crowded, gradients, _QUICKLY).plan


def lacking_bytes_of(error: InfeasibleBudget) -> int:
    """Return by how many bytes the least known plan exceeds the budget."""
    if not isinstance(error, NoPlan):
        return 0
    return max(0, error.least.found_bytes - error.task.budget_bytes)


def most_bytes(options: Options) -> int:
    """Return the largest estimated peak with which plain PyTorch is tried."""
    return int(_NEARLY * options.planned_bytes)
