"""Steps of parts keep to their limit: each call runs the chosen plan, or one that holds less.

The memory of every call is taken from the allocator as its plan says, and metered.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.training import let_search_end
from support.handed import call_of, chain, handed
from tightfit.allocator import CpuMeter
from tightfit.capture.captured import Captured
from tightfit.capture.handed import HandedGraph
from tightfit.capture.traced_call import TracedCall
from tightfit.errors import InfeasibleBudget
from tightfit.execution.guard import Guard
from tightfit.session.options import Options, make_options
from tightfit.session.parts import planning
from tightfit.session.parts.choice import PartPlans, choose
from tightfit.session.parts.kinds import Kind, KnownCalls, Part
from tightfit.session.parts.planning import PartsSettings, StepPlans
from tightfit.session.stages import capture_step
from tightfit.session.step.holding import Holding, overhead_of
from tightfit.session.step.ledger import StepLedger
from tightfit.session.step.observed import LedgerWriter

AMPLE, BASE = 1 << 30, 1 << 16
OPTIONS = make_options(AMPLE, costs="unit", cache=False, limits=(5.0, 0.01))
GRAPH = handed(chain)


def line(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor]:
    """Return what keeps nothing of its own for a backward."""
    return (F.linear(x, weight, bias),)


def part_of(name: str, parts: int) -> Part:
    return Part(name, {"part": nn.Linear(32, 32)}, alike=parts)


def kind_of(part: Part, graph: HandedGraph, capture: Callable[[TracedCall, str], Captured]) -> Kind:
    """Return the kind of the calls of a part: what is known of all that are alike."""
    given = call_of(part.function, graph, part.modules["part"], rows=64)
    return KnownCalls(capture).capture(part, given, OPTIONS).kind


@functools.cache
def captured(graph: HandedGraph) -> Captured:
    """Return the step of a part, captured once: that takes longer than a test."""
    part = part_of("first", 1)
    return kind_of(part, graph, lambda call, name: capture_step(call, OPTIONS, name)).captured


class Steps:
    """Steps of parts that are alike, and the plans of their calls."""

    def __init__(
        self, limit_bytes: int = AMPLE, parts: int = 3, graph: HandedGraph = GRAPH
    ) -> None:
        self.parts = [part_of(f"{number}", parts) for number in range(parts)]
        self.kind = kind_of(self.parts[0], graph, lambda call, name: captured(graph))
        self.guard, self._meter = Guard("cpu", "raise"), CpuMeter()
        self.plans = StepPlans("net", within(limit_bytes), self.guard, PartsSettings())
        self.ledger = StepLedger[Kind]()  # of the last step
        gc.collect()  # what steps before have left must not go amid a step

    def take(
        self,
        called: Sequence[int] | None = None,
        *,
        base_bytes: int = BASE,
        coming_bytes: int = 0,
        stepping_bytes: int = 0,
        between_bytes: int = 0,
        during: Callable[[], None] = lambda: None,
    ) -> int:
        """Take a step that calls some parts, or all; return the most that was held.

        `base_bytes`: held at its begin. `between_bytes`: code before each forward takes so much,
        and frees it after the backward. `during`: is called between forwards and backwards.
        """
        self.guard.before_forward(lambda: base_bytes, self.plans.limit_bytes, is_known=True)
        self._meter.reset_peak()
        begin_bytes = self._meter.live_bytes()
        self.plans.begin("inputs", coming_bytes, stepping_bytes)
        writer, kept, outputs = LedgerWriter(self.guard), list[Kept](), list[Tensor]()
        for number in range(len(self.parts)) if called is None else called:
            between = taken(between_bytes)
            holding = self.plans.holding_for(self.parts[number], self.kind)
            call = writer.forward_begins(self.kind, holding, self.parts[number])
            taken(holding.forward_bytes)
            outputs.append(taken(holding.output_bytes))
            kept.append(Kept(call, holding, taken(holding.saved_bytes), between))
            writer.forward_ended(call)
            del between
        during()
        while kept:
            own = kept.pop()
            outputs.pop()
            tangents = taken(own.holding.tangent_bytes)
            writer.backward_begins(own.call)
            taken(own.holding.rise_bytes)
            writer.backward_ended()
            del own, tangents
        peak_bytes = base_bytes + self._meter.peak_bytes() - begin_bytes
        self.ledger = writer.ledger(self.guard.held_bytes() - self.guard.live_bytes())
        self.plans.ended(self.ledger)
        self.guard.close()
        return peak_bytes

    @property
    def ran(self) -> tuple[Holding, ...]:
        """By which plans the calls of the last step have run."""
        return self.ledger.holdings


@dataclass(frozen=True)
class Kept:
    """What a call and the code behind it hold until its backward."""

    call: int
    holding: Holding
    memory: Tensor
    between: Tensor


def taken(size_bytes: int) -> Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8)


def within(limit_bytes: int) -> Options:
    return dataclasses.replace(OPTIONS, budget_bytes=limit_bytes)


# A call of the chain has values of 8 KiB. Its least plan saves none, and its backward makes three
# in addition to the gradient it is given; plain PyTorch saves four, and makes two.
VALUE = 64 * 32 * 4
LEAST = BASE + 2 * VALUE + (1 + 3) * VALUE  # of three calls: the last works, two outputs wait
MOST = BASE + 2 * VALUE + 3 * 4 * VALUE + (1 + 2) * VALUE
GRADIENTS = 4 * (32 * 32 + 32)  # of one part


def test_a_step_of_which_nothing_is_known_runs_with_least_memory() -> None:
    steps = Steps()
    assert steps.take() == LEAST
    assert steps.ran == (steps.kind.least,) * 3


def test_a_part_that_cannot_hold_less_keeps_everything_at_first() -> None:
    """What it would compute again would be held twice."""
    steps = Steps(graph=handed(line))
    assert steps.kind.least.peak_bytes == steps.kind.most.peak_bytes
    steps.take()
    assert steps.ran == (steps.kind.most,) * 3


@pytest.mark.parametrize("room_bytes", [0, 3 * VALUE, 6 * VALUE, MOST - LEAST])
def test_once_a_step_was_measured_as_little_is_recomputed_as_the_limit_allows(
    room_bytes: int,
) -> None:
    steps = Steps(LEAST + room_bytes)
    assert steps.take() == LEAST
    least_overhead = overhead_of(steps.ran)
    peak_bytes = steps.take()
    assert peak_bytes == steps.plans.planned_bytes(steps.ledger) <= LEAST + room_bytes
    if room_bytes == 0:
        assert steps.ran == (steps.kind.least,) * 3
    elif room_bytes == MOST - LEAST:
        assert overhead_of(steps.ran) == 0.0
    else:
        assert 0.0 < overhead_of(steps.ran) < least_overhead


def test_a_better_choice_comes_between_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def least_at_once(ledger: StepLedger[Any], *_: Any) -> PartPlans:
        least = {kind: kind.least for kind in ledger.calls}
        return PartPlans(least, tuple(least[kind] for kind in ledger.calls), {})

    def here(*asked: Any, apart: bool = False) -> PartPlans | None:
        return choose(*asked)  # a process apart takes long to begin

    monkeypatch.setattr(planning, "choose_at_once", least_at_once)
    monkeypatch.setattr(planning, "choose", here)
    steps = Steps()
    assert [steps.take(), steps.take()] == [LEAST, LEAST]  # no step waits for a search
    let_search_end()
    assert steps.take() == MOST and overhead_of(steps.ran) == 0.0


def test_memory_that_is_to_come_has_room_left() -> None:
    coming, without = Steps(MOST), Steps(MOST - 4 * VALUE)
    for _ in range(2):
        assert coming.take(coming_bytes=4 * VALUE) == without.take() <= MOST - 4 * VALUE
        assert overhead_of(coming.ran) == overhead_of(without.ran) > 0.0


# -- where the limit is too small ---------------------------------------------------------------


@pytest.mark.parametrize("parts", [2, 3, 6])
def test_the_budget_named_in_a_first_step_holds(parts: int) -> None:
    """It is hardly more than the least step takes."""
    least_bytes = LEAST + (parts - 3) * VALUE
    with pytest.raises(InfeasibleBudget) as refused:
        Steps(BASE, parts).take()
    named_bytes = refused.value.minimum_bytes or 0
    assert least_bytes <= named_bytes <= 1.01 * least_bytes
    steps = Steps(named_bytes, parts)
    assert steps.take() == least_bytes and steps.take() <= named_bytes


@pytest.mark.parametrize("stepping_bytes", [0, 2 * LEAST])
def test_a_step_that_is_known_not_to_fit_is_refused_before_it_runs(stepping_bytes: int) -> None:
    """The least that was measured is named, or what the optimizer's step is expected to take."""
    steps = Steps(LEAST)
    steps.take()
    steps.take()
    with pytest.raises(InfeasibleBudget, match="3 parts of net") as refused:
        steps.take(base_bytes=BASE + 64, stepping_bytes=stepping_bytes)
    assert refused.value.minimum_bytes == max(LEAST + 64, stepping_bytes)
    assert steps.take() == LEAST


# -- steps that are not as they were foreseen ---------------------------------------------------


@pytest.mark.parametrize("between_bytes", [64, VALUE // 2, VALUE, 3 * VALUE // 2])
def test_calls_make_up_for_memory_that_was_not_foreseen(between_bytes: int) -> None:
    limit_bytes = LEAST + 6 * VALUE
    steps = Steps(limit_bytes)
    steps.take()
    steps.take()
    planned = steps.ran
    for _ in range(2):  # then it is foreseen
        assert steps.take(between_bytes=between_bytes) <= limit_bytes
        assert steps.ran != planned or between_bytes == 64
    assert steps.take() <= limit_bytes


def test_a_call_that_cannot_make_up_for_it_names_a_budget_that_holds() -> None:
    between_bytes, limit_bytes = 2 * VALUE, LEAST + 6 * VALUE
    for _ in range(2):
        steps = Steps(limit_bytes)
        steps.take()
        steps.take()
        try:
            steps.take(between_bytes=between_bytes)
        except InfeasibleBudget as error:
            assert limit_bytes < (error.minimum_bytes or 0) < MOST
            limit_bytes = error.minimum_bytes or 0
    assert steps.take(between_bytes=between_bytes) <= limit_bytes


def test_a_step_that_begins_with_much_more_held_is_measured_anew() -> None:
    steps = Steps()
    steps.take()
    assert steps.take() == MOST
    assert steps.take(base_bytes=AMPLE // 2) == AMPLE // 2 + LEAST - BASE
    assert steps.take() == MOST


def test_parts_that_did_not_run_have_room_left_where_they_all_fit() -> None:
    limit_bytes = LEAST + VALUE
    steps = Steps(limit_bytes)
    for called in ([0, 1], [0, 2], [0, 1], [0, 1, 2]):
        assert steps.take(called) <= limit_bytes


def test_a_further_part_runs_by_the_plans_of_its_kind() -> None:
    steps = Steps()
    for _ in range(2):
        steps.take([0, 1])
    for _ in range(2):
        assert steps.take() == MOST and overhead_of(steps.ran) == 0.0


def test_parts_that_do_not_all_fit_may_take_turns() -> None:
    limit_bytes = LEAST - VALUE  # of two of them
    steps = Steps(limit_bytes)
    for called in ([0, 1], [0, 2], [0, 1], [1, 2]):
        assert steps.take(called) == limit_bytes
    with pytest.raises(InfeasibleBudget):
        steps.take([0, 1, 2])


# -- what is remembered -------------------------------------------------------------------------


def test_parts_that_others_have_replaced_need_no_room() -> None:
    limit_bytes = LEAST - VALUE + GRADIENTS
    steps = Steps(limit_bytes)
    steps.take([0, 1])
    steps.plans.forget_absent()
    assert {*steps.plans.latest} == {*steps.parts[:2]}
    steps.take([0, 2])
    steps.plans.forget_absent()
    assert {*steps.plans.latest} == {steps.parts[0], steps.parts[2]}
    overheads = []
    for _ in range(2):
        assert steps.take([0, 2]) <= limit_bytes
        overheads.append(overhead_of(steps.ran))
    assert overheads[1] <= overheads[0]


def test_eight_steps_that_are_alike_are_learned_from() -> None:
    steps = Steps()
    learned = []
    for _ in range(9):
        steps.take()
        learned.append(steps.plans.is_learned)
    assert learned == [False] * 7 + [True] * 2


def test_a_step_whose_saved_tensors_were_freed_is_no_model_of_others() -> None:
    steps = Steps()
    steps.take(during=steps.plans.note_freed)
    steps.take()
    assert steps.ran == (steps.kind.least,) * 3  # nothing is known yet
    assert steps.take() == MOST


def test_another_budget_is_planned_for_anew() -> None:
    steps = Steps()
    steps.take()
    assert steps.take() == MOST
    steps.plans.change_options(within(MOST - VALUE))
    assert steps.plans.limit_bytes == MOST - VALUE
    assert steps.take() == LEAST
    assert LEAST < steps.take() <= MOST - VALUE
