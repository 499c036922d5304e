"""Steps that a GPU's allocator places, within a limit of reserved bytes."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Hashable, Iterable
from typing import Any

import msgspec

from tightfit.allocator.caching import AllocatorState, CudaCachingAllocator
from tightfit.arenas.calls import Caller
from tightfit.errors import InfeasibleBudget
from tightfit.execution.placing import placed_runner
from tightfit.execution.runtime import Runner
from tightfit.graph.ir import Graph
from tightfit.plan.plan import Compute, Plan
from tightfit.progress import announce
from tightfit.session.default_addresses import DefaultAddresses
from tightfit.session.memory.account import Account
from tightfit.session.memory.fragmentation import AllocatorStep, Fragmentation
from tightfit.session.options import Options
from tightfit.session.report import Report
from tightfit.units import format_bytes

_LARGE_BYTES = 1 << 20  # up to this, PyTorch's CUDA allocator has segments for small requests
_MOST_FIRST = 1 / 32  # of the limit: left by the first plan
_SETTLED_STEPS = 3  # in a row without a retry: nothing is learned any more
_CHECKED_EVERY = 16  # steps, whether there are retries after all


class Reserved(DefaultAddresses):
    """Steps that the allocator of a GPU places; plans leave room for its fragmentation.

    It reserves more than it gives out, and its limit is the budget. While there are retries, its
    state is read before each large request. Then plans are made again that leave the lost bytes.
    """

    def __init__(self, name: str, account: Account, allocator: CudaCachingAllocator) -> None:
        self._name = name
        self._allocator = allocator
        begin, own_bytes = allocator.state(), account.lasting_bytes()
        self._others = AllocatorState(
            max(0, begin.allocated_bytes - own_bytes), max(0, begin.reserved_bytes - own_bytes), 0
        )
        self._fragmentation = Fragmentation()
        self._has_begun = False
        self._step: AllocatorStep | None = None
        self._steps = 0
        self._without_retry = 0
        self._retries = begin.retries
        self._ran: int | None = None  # the number of the plan that ran last
        self._replaced: int | None = None  # that of a plan for which another is made
        self._reading: tuple[int, Runner] | None = None  # the number of a plan, and its runner
        self._reserved_bytes: int | None = None
        self._warned = False

    # -- steps --------------------------------------------------------------------------------

    def begin_step(self, shape: Hashable, caller: Caller) -> None:
        self._steps += 1
        if self._is_settled and self._steps % _CHECKED_EVERY:
            return
        state = self._state()
        if self._is_settled and state.retries > self._retries:
            self._without_retry = 0
        self._retries = state.retries
        self._step = AllocatorStep(state)

    def runner_for(self, number: int, graph: Graph, plan: Plan, runner: Runner) -> Runner:
        self._ran = number
        if self._is_settled or self._fragmentation.is_over:
            self._reading = None
            return runner
        if self._reading is None or self._reading[0] != number:
            self._reading = number, self._reading_state(graph, plan, runner)
        return self._reading[1]

    def measure(self, inputs: Iterable[Any], options: Options) -> Options:
        """Learn from the last step; return options that leave the bytes that were lost."""
        step, self._step = self._step, None
        if not self._has_begun and options.is_alone:
            return self._begun(options)
        if step is None:
            return options
        step.end(self._state())
        self._reserved_bytes = step.reserved_bytes
        self._without_retry = 0 if step.retries else self._without_retry + 1
        is_new = self._ran is None or self._ran != self._replaced
        if not options.is_alone or not is_new:
            return options
        if self._fragmentation.learn(step, options.limit_bytes, is_whole=self._ran is not None):
            self._replaced, self._without_retry = self._ran, 0
            self._allocator.return_cached()  # as it is cut up for the plan before
            announce(
                f"{self._name}: the allocator reserved {format_bytes(step.reserved_bytes)} of "
                f"{format_bytes(options.limit_bytes)}, with {step.retries} retries: planning with "
                f"{format_bytes(self._fragmentation.left_bytes)} left for fragmentation"
            )
            return dataclasses.replace(options, left_bytes=self._fragmentation.left_bytes)
        self._warn(step, options)
        return options

    def _begun(self, options: Options) -> Options:
        """Leave room for one page of the allocator, which reserves whole pages."""
        self._has_begun = True
        first_bytes = min(self._allocator.page_bytes, round(_MOST_FIRST * options.limit_bytes))
        self._fragmentation = Fragmentation(first_bytes)
        return dataclasses.replace(options, left_bytes=first_bytes) if first_bytes else options

    def leaving_less(self, options: Options, error: InfeasibleBudget) -> Options:
        if not options.left_bytes:
            raise error
        least_bytes = error.call_bytes
        lacking_bytes = 0 if least_bytes is None else least_bytes - options.limit_bytes
        self._fragmentation.leave_less(lacking_bytes)
        left_bytes = self._fragmentation.left_bytes
        announce(
            f"{self._name}: no plan leaves {format_bytes(options.left_bytes)} for fragmentation of "
            f"the allocator, but {format_bytes(left_bytes) if left_bytes else 0}: "
            "steps may be slower, as it frees cached memory during them. "
            f"{str(error).splitlines()[0]}"
        )
        return dataclasses.replace(options, left_bytes=left_bytes)

    def added_to(self, report: Report) -> Report:
        """Return a report with bytes reserved in the last step that was looked at."""
        reserved_bytes = self._reserved_bytes
        if reserved_bytes is None:
            reserved_bytes = self._state().reserved_bytes
        return msgspec.structs.replace(report, reserved_bytes=reserved_bytes)

    @property
    def _is_settled(self) -> bool:
        return self._without_retry >= _SETTLED_STEPS

    def _state(self) -> AllocatorState:
        """Return the allocator's state, without bytes that others held when this was made."""
        now, others = self._allocator.state(), self._others
        return AllocatorState(
            max(0, now.allocated_bytes - others.allocated_bytes),
            max(0, now.reserved_bytes - others.reserved_bytes),
            now.retries,
        )

    def _warn(self, step: AllocatorStep, options: Options) -> None:
        """Warn, once, where more is reserved than the budget and nothing refuses it."""
        if step.reserved_bytes > options.limit_bytes and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self._name}: the allocator has reserved {format_bytes(step.reserved_bytes)}, "
                f"more than the budget of {format_bytes(options.limit_bytes)}. Leave "
                "on_exceed='warn' out to have that refused",
                stacklevel=2,
            )

    # -- reading the allocator's state ---------------------------------------------------------

    def _reading_state(self, graph: Graph, plan: Plan, runner: Runner) -> Runner:
        large = [
            number
            for number, step in enumerate(plan.instructions)
            if isinstance(step, Compute) and _is_large(graph, step)
        ]
        return placed_runner(runner, plan, self, large)

    def begin(self) -> Reserved:
        """Return the object that is notified before each large request."""
        return self

    def end(self, step: Reserved) -> None:
        """Do nothing."""

    def turn(self, instruction: int) -> None:
        """Read the allocator's state before an instruction."""
        if self._step is not None:
            self._step.note(self._state())

    def pause(self) -> None:
        """Do nothing."""


def _is_large(graph: Graph, step: Compute) -> bool:
    alternative = graph.ops[step.op].alternatives[step.alternative]
    workspace_bytes = alternative.variants[step.variant].workspace_bytes
    sizes = (graph.values[value].size_bytes for value in alternative.writes)
    return max((workspace_bytes, *sizes)) > _LARGE_BYTES
