"""Graphs and plans for tests: small ones by hand, random ones from hypothesis.

`training_graphs` draws valid steps that use every feature of the format; `compute_lists` draws
valid orders of computation with recomputations for one of them.
"""

from __future__ import annotations

from hypothesis import strategies as st

from tightfit.graph import (
    Alternative,
    Choice,
    Graph,
    Op,
    Segment,
    Value,
    Variant,
    validate_graph,
)
from tightfit.plan import Compute


def two_layers() -> Graph:
    """A step of two linear layers with a ReLU between them; sizes are easy to add up."""
    values = (
        Value(id=0, name="x", size_bytes=100, role="input"),
        Value(id=1, name="first.weight", size_bytes=1000, role="parameter"),
        Value(id=2, name="second.weight", size_bytes=1000, role="parameter"),
        Value(id=3, name="first", size_bytes=400),
        Value(id=4, name="relu", size_bytes=400),
        Value(id=5, name="second", size_bytes=100, fate="returned"),
        Value(id=6, name="gradient of second", size_bytes=100, role="tangent", segment=1),
        Value(
            id=7,
            name="gradient of second.weight",
            size_bytes=1000,
            role="gradient",
            fate="handed_over",
        ),
        Value(id=8, name="gradient of relu", size_bytes=400),
        Value(id=9, name="gradient of first", size_bytes=400),
        Value(
            id=10,
            name="gradient of first.weight",
            size_bytes=1000,
            role="gradient",
            fate="handed_over",
        ),
    )

    def op(identity: int, target: str, module: str, reads: tuple[int, ...], write: int) -> Op:
        backward = {3: 2, 4: 2, 5: 1, 6: 0}
        return Op(
            id=identity,
            target=target,
            module=module,
            segment=int(identity > 2),
            partner=backward.get(identity),
            alternatives=(
                Alternative(reads=reads, writes=(write,), variants=(Variant(cost_s=1.0),)),
            ),
        )

    ops = (
        op(0, "aten.mm", "first", (0, 1), 3),
        op(1, "aten.relu", "act", (3,), 4),
        op(2, "aten.mm", "second", (4, 2), 5),
        op(3, "aten.mm", "second", (4, 6), 7),
        op(4, "aten.mm", "second", (6, 2), 8),
        op(5, "aten.threshold_backward", "act", (8, 4), 9),
        op(6, "aten.mm", "first", (9, 0), 10),
    )
    segments = (
        Segment(id=0, phase="forward"),
        Segment(id=1, phase="backward", outside_bytes=104),
    )
    return validate_graph(
        Graph(
            name="two layers",
            values=values,
            ops=ops,
            segments=segments,
            constants_bytes={"parameters": 2000, "inputs": 100},
        )
    )


class _Drawing:
    """A graph while it is drawn."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self.choices: list[Choice] = []

    def value(self, size_bytes: int | None = None, **fields: object) -> int:
        if size_bytes is None:
            size_bytes = self.draw(st.integers(0, 9))
        identity = len(self.values)
        self.values.append(Value(id=identity, name=f"v{identity}", size_bytes=size_bytes, **fields))
        return identity

    def variants(self) -> tuple[Variant, ...]:
        drawn = self.draw(
            st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), min_size=1, max_size=2)
        )
        return tuple(Variant(cost_s=float(cost), workspace_bytes=space) for cost, space in drawn)

    def op(self, *alternatives: Alternative, **fields: object) -> int:
        identity = len(self.ops)
        self.ops.append(Op(id=identity, target="test.op", alternatives=alternatives, **fields))
        return identity

    def forward(self, segment: int, readable: list[int], buffer: int) -> tuple[int, int, list[int]]:
        """Draw one forward op; return the op, its main output and the values it reads."""
        draw = self.draw
        reads = draw(st.lists(st.sampled_from(readable), min_size=1, max_size=2, unique=True))
        out = self.value()
        base = Alternative(reads=tuple(reads), writes=(out,), variants=self.variants())
        kind = draw(st.sampled_from(["plain", "plain", "in place", "norm", "mask", "random"]))
        fields = {"segment": segment, "module": f"layer{len(self.ops)}"}
        if draw(st.integers(0, 9)) == 0:
            fields["pinned"] = "the test says so"
        if kind == "in place" and self.may_overwrite(reads[0]):
            size = self.values[reads[0]].size_bytes
            self.values[out] = Value(id=out, name=f"v{out}", size_bytes=size)
            in_place = Alternative(
                name="in place",
                reads=base.reads,
                writes=(out,),
                overwrites=reads[0],
                variants=self.variants(),
            )
            return self.op(base, in_place, **fields), out, reads
        if kind == "norm":
            statistics = self.value()
            fresh = self.value(fate="written_back", replaces=buffer)
            first = Alternative(
                reads=(*base.reads, buffer),
                writes=(out, statistics, fresh),
                use="first",
                variants=self.variants(),
            )
            again = Alternative(
                name="from statistics",
                reads=(*base.reads, statistics),
                writes=(out,),
                use="again",
                variants=self.variants(),
            )
            return self.op(first, again, **fields), out, reads
        if kind == "random":
            fields["random_state_bytes"] = draw(st.integers(1, 4))
        op = self.op(base, **fields)
        if kind == "mask":
            mask = self.value()
            self.op(
                Alternative(reads=(out,), writes=(mask,), variants=self.variants()),
                segment=segment,
                required=False,
            )
            return op, out, [*reads, mask]
        return op, out, reads

    def may_overwrite(self, value: int) -> bool:
        return not self.values[value].is_constant and self.values[value].fate == "none"

    def backward(
        self, partner: int, segment: int, incoming: int, saved: list[int], out: int
    ) -> int:
        """Draw the backward op of a forward op; return the gradient it passes on.

        It reads what the forward op read, its output, or a mask that an optional op makes of it.
        """
        draw = self.draw
        gradient = self.value()
        writes = [gradient]
        if draw(st.booleans()):
            writes.append(self.value(role="gradient", fate="handed_over"))
        by_input = (incoming, *saved[:1])
        by_result = (incoming, saved[-1] if len(saved) > 1 else out)
        reads, other = (by_input, by_result) if draw(st.booleans()) else (by_result, by_input)
        alternatives = [Alternative(reads=reads, writes=tuple(writes), variants=self.variants())]
        if len(saved) > 1 or out != saved[0]:
            alternatives.append(
                Alternative(
                    name="other", reads=other, writes=tuple(writes), variants=self.variants()
                )
            )
        op = self.op(*alternatives, segment=segment, partner=partner, module=f"layer{partner}")
        if len(alternatives) == 2 and draw(st.booleans()):
            self.choices.append(Choice(branches=(((op, 0),), ((op, 1),))))
        return gradient


@st.composite
def training_graphs(draw: st.DrawFn, max_layers: int = 5) -> Graph:
    """Draw a valid step: forward ops, a crossing, the backward ops in reverse.

    Half of them have two programs, entered forward 0, forward 1, backward 1, backward 0.
    """
    drawing = _Drawing(draw)
    programs = draw(st.integers(1, 2))
    layers = draw(st.integers(programs, max_layers))
    inputs = drawing.value(role="input")
    buffer = drawing.value(role="buffer")
    readable = [inputs]
    records = []
    for layer in range(layers):
        program = layer * programs // layers
        op, out, saved = drawing.forward(program, readable, buffer)
        readable.append(out)
        records.append((op, out, saved, program))
    last = drawing.values[readable[-1]]
    drawing.values[last.id] = Value(
        id=last.id, name=last.name, size_bytes=last.size_bytes, fate="returned"
    )
    incoming = drawing.value(role="tangent", segment=programs)
    for op, out, saved, program in reversed(records):
        incoming = drawing.backward(op, 2 * programs - 1 - program, incoming, saved, out)
    segments = [Segment(id=i, phase="forward", program=i) for i in range(programs)]
    for program in reversed(range(programs)):
        outside = draw(st.integers(0, 12))
        segments.append(
            Segment(id=len(segments), phase="backward", program=program, outside_bytes=outside)
        )
    constants = {
        "inputs": drawing.values[inputs].size_bytes,
        "buffers": drawing.values[buffer].size_bytes,
        "parameters": draw(st.integers(0, 20)),
    }
    return validate_graph(
        Graph(
            name="drawn",
            values=tuple(drawing.values),
            ops=tuple(drawing.ops),
            segments=tuple(segments),
            choices=tuple(drawing.choices),
            constants_bytes=constants,
        )
    )


@st.composite
def compute_lists(draw: st.DrawFn, graph: Graph) -> list[Compute]:
    """Draw a valid order of computes: every op once in the graph's order, some again."""
    schedule = _Schedule(draw, graph)
    for op in graph.ops:
        if not (op.required or schedule.is_needed(op) or draw(st.booleans())):
            continue
        for _ in range(draw(st.integers(0, 2))):
            schedule.recompute(op.segment)
        schedule.first(op)
    return schedule.computes


class _Schedule:
    """Computes so far, and which values could still be read."""

    def __init__(self, draw: st.DrawFn, graph: Graph) -> None:
        self.draw = draw
        self.graph = graph
        self.computes: list[Compute] = []
        self.segment = 0
        self.done: set[int] = set()
        self.readable = {v.id for v in graph.values if v.is_constant or v.role == "tangent"}

    def is_needed(self, op: Op) -> bool:
        """Whether a later op has only alternatives that read what this op writes."""
        written = {v for a in op.alternatives for v in a.writes}
        return any(
            all(written.intersection(a.reads) for a in later.alternatives)
            for later in self.graph.ops[op.id + 1 :]
        )

    def first(self, op: Op) -> None:
        self.enter(op.segment)
        choices = [
            index
            for index, alternative in enumerate(op.alternatives)
            if alternative.use != "again" and self.may_run(op, alternative)
        ]
        self.run(op, self.draw(st.sampled_from(choices)))
        self.done.add(op.id)

    def recompute(self, segment: int) -> None:
        self.enter(segment)
        candidates = [
            (op, index)
            for op in self.graph.ops
            if op.id in self.done and op.pinned is None
            if self.program(op.segment) == self.program(segment)
            for index, alternative in enumerate(op.alternatives)
            if alternative.use != "first" and self.may_run_again(op, alternative)
        ]
        if candidates:
            self.run(*self.draw(st.sampled_from(candidates)))

    def program(self, segment: int) -> int:
        return self.graph.segments[segment].program

    def may_run(self, op: Op, alternative: Alternative) -> bool:
        if not self.readable.issuperset(alternative.reads):
            return False
        target = alternative.overwrites
        later = self.graph.ops[op.id + 1 :]
        return target is None or not any(target in a.reads for o in later for a in o.alternatives)

    def may_run_again(self, op: Op, alternative: Alternative) -> bool:
        values = self.graph.values
        return (
            alternative.overwrites is None
            and self.readable.issuperset(alternative.reads)
            and not any(values[v].fate == "handed_over" for v in alternative.writes)
        )

    def enter(self, segment: int) -> None:
        if segment != self.segment:
            self.segment = segment
            written_back = {v.id for v in self.graph.values if v.fate == "written_back"}
            self.readable -= written_back

    def run(self, op: Op, index: int) -> None:
        alternative = op.alternatives[index]
        variant = self.draw(st.integers(0, len(alternative.variants) - 1))
        self.computes.append(Compute(op.id, index, variant))
        self.readable |= set(alternative.writes)
        if alternative.overwrites is not None:
            self.readable.discard(alternative.overwrites)
