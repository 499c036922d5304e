"""Steps of several calls as programs: run with any plans, byte by byte."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st

from tightfit.session.step.holding import Holding
from tightfit.session.step.ledger import StepLedger
from tightfit.session.step.observed import LedgerWriter

SIZES = st.integers(0, 100)
KINDS = "abc"


@dataclass
class Memory:
    """What is held above the begin of a step, as a meter reads it."""

    held: int = 0
    most: int = 0
    peaks: list[int] = field(default_factory=list)

    def change(self, by: int) -> None:
        self.held += by
        self.most = max(self.most, self.held)

    def touch(self, more: int) -> None:
        self.change(more)
        self.change(-more)

    def live_bytes(self) -> int:
        return self.held

    def take_peak(self) -> int:
        self.peaks.append(self.most)
        self.most = self.held
        return self.peaks[-1]


@dataclass(frozen=True)
class Turn:
    """A forward or a backward, and the code that follows it."""

    call: int
    is_forward: bool
    unforeseen: int
    passing: int
    kept: int
    frees_output: bool


@dataclass(frozen=True)
class Program:
    """A step: kinds of calls in order, turns, and how large outputs and gradients are."""

    kinds: tuple[str, ...]
    turns: tuple[Turn, ...]

    def run(self, holdings: list[Holding]) -> StepLedger[str]:
        """Return the ledger of the step with these plans."""
        memory = Memory()
        writer = LedgerWriter(memory)
        for turn in self.turns:
            own = holdings[turn.call]
            if turn.is_forward:
                assert writer.forward_begins(self.kinds[turn.call], own) == turn.call
                memory.touch(own.forward_bytes + turn.unforeseen)
                memory.change(own.staying_bytes)
                writer.forward_ended(turn.call)
            else:
                memory.change(own.tangent_bytes)
                writer.backward_begins(turn.call)
                memory.touch(own.rise_bytes + turn.unforeseen)
                memory.change(-own.saved_bytes - own.tangent_bytes)
                writer.backward_ended()
            memory.touch(turn.passing)
            memory.change(turn.kept - own.output_bytes * turn.frees_output)
        assert writer.is_complete
        return writer.ledger(0)

    def peak(self, holdings: list[Holding]) -> int:
        """Return the most that is held while a call holds anything."""
        return max(i.peak_bytes for i in self.run(holdings).intervals if i.is_planned)


@st.composite
def programs(draw: st.DrawFn, calls: int = 4, kinds: int = 2) -> Program:
    count = draw(st.integers(1, calls))
    order = draw(st.permutations([*range(count)] * 2))
    named, begun, turns = list[int](), set[int](), list[Turn]()
    for each in order:  # numbered by their forwards
        if each not in named:
            named.append(each)
        call = named.index(each)
        unforeseen, passing, kept = (draw(st.integers(0, 20)) for _ in range(3))
        is_forward = call not in begun
        begun.add(call)
        turns.append(Turn(call, is_forward, unforeseen, passing, kept, not is_forward))
    called = tuple(draw(st.sampled_from(KINDS[:kinds])) for _ in range(count))
    return Program(called, tuple(turns))


@st.composite
def menus(draw: st.DrawFn, kinds: int = 2, most: int = 4) -> dict[str, list[Holding]]:
    """Return for each kind plans: the more one saves, the less it costs."""
    found = {}
    for kind in KINDS[:kinds]:
        output, tangent = draw(SIZES), draw(SIZES)
        saved = sorted(draw(st.sets(SIZES, min_size=1, max_size=most)))
        costs = sorted(draw(st.lists(st.integers(1, 9), min_size=len(saved), max_size=len(saved))))
        extra = [draw(SIZES) for _ in saved]
        found[kind] = [
            Holding(None, keeps, output, tangent, keeps + output + more, draw(SIZES), cost_s, 1.0)
            for keeps, cost_s, more in zip(saved, reversed(costs), extra, strict=True)
        ]
    return found
