"""Loads begun earlier or later, and waits for stores put off, as far as the budget allows.

Computations and their order stay: only the places of loads change, and those where stored values
leave. Each goes to where the link asks for it, or as near to it as bytes allow.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from tightfit.graph.ir import Graph, ValueId
from tightfit.plan.plan import Compute, Far, Free, Instruction, Load, Plan, Store
from tightfit.plan.simulate import simulate
from tightfit.planners.moves.gaps import last_until


@dataclass(frozen=True)
class _FarInterval:
    """One stay of a value in far memory; a place is the number of the next fixed instruction."""

    value: ValueId
    # leave, load: where it leaves near memory, and where its load begins
    leave: int
    load: int
    earliest: int  # the first place at which it may leave
    use: int  # the instruction that waits for its load


def tidy(graph: Graph, plan: Plan) -> Plan:
    """Return a plan with its moves where the link asks for them, as far as the budget allows."""
    if plan.far is None or not any(isinstance(step, Load) for step in plan.instructions):
        return plan
    tidying = _Tidying(_Reading(graph, plan, plan.far))
    tidying.put_off_leaving()
    tidying.put_loads()
    return tidying.plan()


class _Reading:
    """A plan apart: steps that stay in their places, with times and bytes, and stays far away."""

    def __init__(self, graph: Graph, plan: Plan, far: Far) -> None:
        self.plan = plan
        self.far = far
        self.sizes = [value.size_bytes for value in graph.values]
        self.fixed: list[Instruction] = []
        self.begins: list[float] = []  # of the fixed instructions, without stalls
        self.bytes: list[int] = []  # alive during each of them
        self.stays: list[_FarInterval] = []
        self.stored_s: dict[ValueId, float] = {}  # when stores end
        self._now_s = self._free_s = 0.0
        self._read(graph, simulate(graph, plan).during_bytes)

    def _read(self, graph: Graph, during: Sequence[int]) -> None:
        leaving = _leaving_frees(graph, self.plan)
        left: dict[ValueId, int] = {}
        coming: dict[ValueId, tuple[int, int, int]] = {}  # leave, load, earliest
        used: dict[ValueId, int] = {}
        for index, step in enumerate(self.plan.instructions):
            place = len(self.fixed)
            if index in leaving:
                left[leaving[index]] = place
            elif isinstance(step, Load) and step.value in left:
                value = step.value
                coming[value] = (left.pop(value), place, used.get(value, -1) + 1)
            else:  # also a load of a value that an op wrote over: it did not leave by itself
                for value in _uses(graph, step):
                    used[value] = place
                    if value in coming:
                        self.stays.append(_FarInterval(value, *coming.pop(value), place))
                self._fix(graph, step, during[index])
        for value, places in coming.items():
            self.stays.append(_FarInterval(value, *places, len(self.fixed) - 1))

    def _fix(self, graph: Graph, step: Instruction, bytes_: int) -> None:
        self.fixed.append(step)
        self.begins.append(self._now_s)
        self.bytes.append(bytes_)
        if isinstance(step, Compute):
            self._now_s += step.cost_s(graph)
        elif isinstance(step, Store):
            took_s = self.far.store_s(self.sizes[step.value])
            self._free_s = self.stored_s[step.value] = max(self._free_s, self._now_s) + took_s


class _Tidying:
    """New places for the stays of a plan."""

    def __init__(self, reading: _Reading) -> None:
        self.reading = reading
        self.stays = sorted(reading.stays, key=lambda stay: stay.use)
        self.leaves = [stay.leave for stay in self.stays]
        self.loads = [stay.load for stay in self.stays]
        self.bytes = np.array(reading.bytes, dtype=np.int64)

    def put_off_leaving(self) -> None:
        """Let each value leave once its store has ended."""
        ends = [self.reading.stored_s[stay.value] for stay in self.stays]
        for number in sorted(range(len(self.stays)), key=ends.__getitem__):
            stay = self.stays[number]
            wanted = bisect_left(self.reading.begins, ends[number])
            wanted = min(max(wanted, stay.earliest), stay.load)
            if wanted > stay.leave:
                over = self._over(stay.value, stay.leave, wanted)
                wanted = wanted if over.size == 0 else stay.leave + int(over[0])
            self._alive_for(stay.value, stay.leave, wanted)
            self.leaves[number] = wanted

    def put_loads(self) -> None:
        """Move loads as late as their readers allow, then earlier where they come too late."""
        due = self._due_places()
        for number, (stay, wanted) in enumerate(zip(self.stays, due, strict=True)):
            if wanted > stay.load:
                self._alive_for(stay.value, wanted, stay.load)
                self.loads[number] = wanted
        for number, (stay, wanted) in enumerate(zip(self.stays, due, strict=True)):
            if wanted < stay.load:
                over = self._over(stay.value, wanted, stay.load)
                place = wanted if over.size == 0 else wanted + int(over[-1]) + 1
                self._alive_for(stay.value, place, stay.load)
                self.loads[number] = place

    def _due_places(self) -> list[int]:
        """Where each load should begin: as late as it and those after it allow."""
        begins = self.reading.begins
        due_s = math.inf
        places: list[int] = []
        for stay, leave in zip(reversed(self.stays), reversed(self.leaves), strict=True):
            took_s = self.reading.far.load_s(self.reading.sizes[stay.value])
            due_s = min(due_s, begins[stay.use]) - took_s
            places.append(min(max(last_until(begins, due_s), leave), stay.use))
        return places[::-1]

    def plan(self) -> Plan:
        """The plan with the moves at their places."""
        at: dict[int, list[Instruction]] = defaultdict(list)
        for stay, place in zip(self.stays, self.leaves, strict=True):
            at[place].append(Free(stay.value))
        for stay, place in zip(self.stays, self.loads, strict=True):
            at[place].append(Load(stay.value))
        instructions: list[Instruction] = []
        for place, step in enumerate(self.reading.fixed):
            instructions += at.get(place, ())
            instructions.append(step)
        return msgspec.structs.replace(self.reading.plan, instructions=tuple(instructions))

    def _alive_for(self, value: ValueId, first: int, end: int) -> None:
        """Account that a value is alive from a place to another; fewer than before if reversed."""
        size = self.reading.sizes[value]
        self.bytes[first:end] += size
        self.bytes[end:first] -= size

    def _over(self, value: ValueId, first: int, end: int) -> npt.NDArray[np.intp]:
        """The instructions, counted from the first on, that have no room for a value."""
        room = self.reading.plan.budget_bytes - self.reading.sizes[value]
        return np.nonzero(self.bytes[first:end] > room)[0]


def _leaving_frees(graph: Graph, plan: Plan) -> dict[int, ValueId]:
    """The frees after which the next use of a value is its load, by their numbers."""
    following: dict[ValueId, bool] = {}  # value -> whether it is loaded next, walking backwards
    found: dict[int, ValueId] = {}
    for index in range(len(plan.instructions) - 1, -1, -1):
        step = plan.instructions[index]
        if isinstance(step, Free):
            if following.get(step.value, False):
                found[index] = step.value
        elif isinstance(step, Load):
            following[step.value] = True
        else:
            following.update(dict.fromkeys(_uses(graph, step), False))
    return found


def _uses(graph: Graph, step: Instruction) -> tuple[ValueId, ...]:
    """The values that an instruction needs near, or makes, or frees."""
    match step:
        case Compute():
            way = step.alternative_in(graph)
            return (*way.reads, *way.writes)
        case Store(value) | Free(value):
            return (value,)
        case _:
            return ()
