"""The verifier's own accounts of bytes: values alive in near memory, and in far memory."""

from __future__ import annotations

from tightfit.graph.ir import Graph, ValueId
from tightfit.plan.plan import Load, Plan


class NearAccount:
    """Values in near memory and their bytes; for the others, when they left."""

    def __init__(self, graph: Graph) -> None:
        self.values = graph.values
        self.alive: set[ValueId] = set()
        self.gone: dict[ValueId, int] = {}  # value -> instruction that ended its last instance
        self.handed_over: dict[ValueId, int] = {}
        self.bytes = graph.constant_bytes

    def take(self, size_bytes: int) -> None:
        """Account bytes that are no value's; negative: they are given back."""
        self.bytes += size_bytes

    def add(self, value: ValueId) -> None:
        """Account a new instance; an instance that is alive already keeps its bytes."""
        if value not in self.alive:
            self.alive.add(value)
            self.bytes += self.values[value].size_bytes

    def drop(self, value: ValueId, index: int) -> None:
        self.alive.remove(value)
        self.gone[value] = index
        self.bytes -= self.values[value].size_bytes

    def hand_over(self, value: ValueId, index: int) -> None:
        """Note that a gradient belongs to its owner from now on."""
        self.handed_over[value] = index

    def may_be_read(self, value: ValueId) -> bool:
        """Whether an op may read a value now."""
        if self.values[value].is_constant:
            return True
        return value in self.alive and value not in self.handed_over

    def why_dead(self, value: ValueId) -> str:
        if value in self.handed_over:
            return f"handed over at instruction {self.handed_over[value]}"
        if value in self.gone:
            return f"gone since instruction {self.gone[value]}"
        return "not computed yet"


class FarAccount:
    """Values in far memory: since when, until when, and their bytes together."""

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self.values = graph.values
        self.stored: dict[ValueId, int] = {}  # value -> instruction that stored it
        self.expected: dict[ValueId, int] = {}  # value -> loads of it that have not begun
        self.coming: set[ValueId] = set()  # loads that were not waited for
        self.bytes = self.peak_bytes = 0
        for step in plan.instructions:
            if isinstance(step, Load):
                self.expected[step.value] = self.expected.get(step.value, 0) + 1

    def store(self, value: ValueId, index: int) -> None:
        """Account a copy from the instruction on that begins it."""
        self.stored[value] = index
        self.bytes += self.values[value].size_bytes
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def load(self, value: ValueId) -> None:
        """Note that a value is on its way."""
        self.expected[value] -= 1
        self.coming.add(value)

    def arrive(self, value: ValueId) -> None:
        """Note that an op has waited for a value; its last load ends its copy in far memory."""
        if value in self.coming:
            self.coming.remove(value)
            if self.expected[value] == 0:
                self.bytes -= self.values[value].size_bytes
