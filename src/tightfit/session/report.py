"""The report on a fitted model or step, as one frozen value."""

from __future__ import annotations

import msgspec

from tightfit.arenas.arena import ArenaReport
from tightfit.execution.far.links import operator_threads
from tightfit.execution.far.step import Moved
from tightfit.execution.guard import StepPeaks
from tightfit.graph.ir import Graph
from tightfit.plan.explain import PlannedPart
from tightfit.plan.less_exact import LessExact
from tightfit.plan.plan import Outcome, Plan
from tightfit.plan.simulate import simulate
from tightfit.units import format_bytes, format_seconds


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """The memory that a process held for the steps of a callable with an arena, in bytes."""

    height_bytes: int  # of the arena
    # Of tensors between two steps: parameters, gradients, the optimizer's state, inputs, and
    # tensors of the loop
    tensor_bytes: int
    # Other memory since the callable was fitted: objects of Python and the planner, free pages of
    # the C library, workspaces of libraries, stacks of threads
    rest_bytes: int
    file_bytes: int  # pages of files that were read since then: code of libraries

    @property
    def planned_bytes(self) -> int:
        """The arena and the tensors outside of it."""
        return self.height_bytes + self.tensor_bytes

    @property
    def total_bytes(self) -> int:
        return self.planned_bytes + self.rest_bytes + self.file_bytes

    def __str__(self) -> str:
        """Return one line for people."""
        return (
            f"the process holds {format_bytes(self.total_bytes)}: arena "
            f"{format_bytes(self.height_bytes)}, other tensors {format_bytes(self.tensor_bytes)}, "
            f"neither {format_bytes(self.rest_bytes)}, code of libraries "
            f"{format_bytes(self.file_bytes)}"
        )


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Promises of the current plan and bytes held by the last step."""

    # budget_bytes, constant_bytes, planned_peak_bytes: the limit, bytes resident the whole step,
    # and the peak of the plan; of a compiled plan the peak that was measured before it was used
    budget_bytes: int
    constant_bytes: int
    planned_peak_bytes: int
    # overhead, bound, gap: fractions of the step's cost with nothing recomputed
    overhead: float
    bound: float
    gap: float
    status: str  # ``"optimal"`` or ``"feasible"``
    cost_source: str  # where costs come from
    measured: StepPeaks | None  # peaks of the last complete step
    plan: Plan | None  # the current plan; None where parts are planned one by one
    compiled: bool = False  # whether the plan runs compiled, not operator by operator
    # Where parts are: for each kind of part, named by the first, the plans that run
    plans: dict[str, tuple[Plan, ...]] = {}
    calls: int = 0  # calls of parts in a step. Cost and overhead are of the parts.
    # Where parts are: every plan that runs, in the order of the first calls
    parts: tuple[PlannedPart, ...] = ()
    arena: ArenaReport | None = None  # use of planned addresses, if an arena was asked for
    held: Held | None = None  # memory of the process for it then, between two steps
    # Cost with the next, less exact class of alternatives, if that was asked for
    next_exactness: LessExact | None = None
    outside: dict[str, str] = {}  # code that ran eagerly outside of every plan, and why
    # Reserved by the allocator of a GPU in a step; None: it was not looked at
    reserved_bytes: int | None = None
    # moves, measured_moves: transfers to far memory and back, as planned, and in the last step;
    # None: nothing, or no step has ended yet
    moves: Moved | None = None
    measured_moves: Moved | None = None

    @property
    def measured_peak_bytes(self) -> int | None:
        """The measured peak of the last complete step, constants included."""
        return self.measured.peak_bytes if self.measured is not None else None

    def __str__(self) -> str:
        """Return two lines for people, and further ones for moves, an arena and code outside."""
        measured = self.measured_peak_bytes
        held = f", measured {format_bytes(measured)}" if measured is not None else ""
        if self.reserved_bytes is not None:
            held += f", reserved {format_bytes(self.reserved_bytes)}"
        return (
            f"budget {format_bytes(self.budget_bytes)}: "
            f"{'peak of the compiled plan' if self.compiled else 'planned peak'} "
            f"{format_bytes(self.planned_peak_bytes)} (constants "
            f"{format_bytes(self.constant_bytes)}){held}\n"
            f"extra compute {self.overhead:.1%}, {self._quality}"
            f"{self._moves_line}{self._arena_line}{self._next_exactness_line}{self._outside_lines}"
        )

    @property
    def _outside_lines(self) -> str:
        return "".join(f"\noutside of every plan: {at}: {why}" for at, why in self.outside.items())

    @property
    def _moves_line(self) -> str:
        if self.moves is None:
            return ""
        last = self.measured_moves
        waited = "" if last is None else f", measured {format_seconds(last.stall_s)}"
        return (
            f"\nmoves {format_bytes(self.moves.stored_bytes)} to far memory and "
            f"{format_bytes(self.moves.loaded_bytes)} back, at most "
            f"{format_bytes(self.moves.far_bytes)} there; waits "
            f"{format_seconds(self.moves.stall_s)} for that{waited}"
        )

    @property
    def _next_exactness_line(self) -> str:
        return "" if self.next_exactness is None else f"\n{self.next_exactness.sentence}"

    @property
    def _arena_line(self) -> str:
        if self.held is None or self.arena is None:
            return ""
        return f"\n{self.held}; {self.arena.exact_steps} of {self.arena.steps} steps as laid out"

    @property
    def _quality(self) -> str:
        """The baseline of the extra compute, and the quality of the plan."""
        if self.plan is None:
            parts = f"{self.calls} planned part{'s' * (self.calls != 1)}"
            kinds = f"{len(self.plans)} kind{'s' * (len(self.plans) != 1)}"
            return f"of {parts} of {kinds} (costs {self.cost_source})"
        return f"proven least {self.bound:.1%} ({self.status}, costs {self.cost_source})"


def planned_moves(graph: Graph, outcome: Outcome) -> Moved | None:
    """Return the bytes that a plan moves to far memory and back; None: nothing."""
    if outcome.plan is None or outcome.plan.far is None:
        return None
    result = simulate(graph, outcome.plan)
    by_direction = {"store": 0, "load": 0}
    for transfer in result.transfers:
        by_direction[transfer.direction] += transfer.size_bytes
    return Moved(
        stored_bytes=by_direction["store"],
        loaded_bytes=by_direction["load"],
        far_bytes=result.far_peak_bytes,
        stall_s=result.stall_s / operator_threads(graph.device.kind),
    )


def report_of(
    outcome: Outcome,
    constant_bytes: int,
    budget_bytes: int,
    cost_source: str,
    measured: StepPeaks | None,
    compiled_peak_bytes: int | None = None,
) -> Report:
    assert outcome.plan is not None
    return Report(
        budget_bytes=budget_bytes,
        constant_bytes=constant_bytes,
        planned_peak_bytes=(
            outcome.peak_bytes if compiled_peak_bytes is None else compiled_peak_bytes
        ),
        overhead=outcome.overhead,
        bound=outcome.bound,
        gap=outcome.gap,
        status=outcome.status,
        cost_source=cost_source,
        measured=measured,
        plan=outcome.plan,
        compiled=compiled_peak_bytes is not None,
    )
