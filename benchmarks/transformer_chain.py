"""A training step of a deep transformer as a graph, written down without capturing a model.

It has the shape of a large language model's step (about 45 ops a layer, layers all alike), so that
the planner's time and memory can be measured at any number of ops.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tightfit.graph import Alternative, Graph, Op, Segment, Value, Variant, validate_graph

__all__ = ["transformer_chain"]

MIB = 1 << 20
COST_S = 1e-5
OPS_PER_LAYER = 42  # forward, backward, and sums of gradients


@dataclass(frozen=True)
class _Step:
    """A forward op as its backward needs it: what it read, made and saves."""

    op: int
    name: str
    reads: tuple[int, ...]
    write: int
    saved: tuple[int, ...]
    cost: float


@dataclass
class _Builder:
    values: list[Value] = field(default_factory=list[Value])
    ops: list[Op] = field(default_factory=list[Op])
    steps: list[_Step] = field(default_factory=list[_Step])

    def value(self, size_bytes: int, **fields: object) -> int:
        number = len(self.values)
        self.values.append(Value(id=number, name=f"v{number}", size_bytes=size_bytes, **fields))  # type: ignore[arg-type]
        return number

    def op(self, name: str, reads: tuple[int, ...], write: int, cost: float, **fields: int) -> int:
        way = Alternative(
            reads=tuple(dict.fromkeys(reads)),
            writes=(write,),
            variants=(Variant(cost_s=cost * COST_S),),
        )
        number = len(self.ops)
        self.ops.append(Op(id=number, target=name, alternatives=(way,), **fields))  # type: ignore[arg-type]
        return number

    def forward(
        self, name: str, reads: tuple[int, ...], mib: int, cost: float, *, saves: bool = True
    ) -> int:
        write = self.value(mib * MIB)
        op = self.op(name, reads, write, cost)
        self.steps.append(_Step(op, name, reads, write, reads if saves else (), cost))
        return write

    def layer(self, x: int) -> int:
        normed = self.forward("layer_norm", (x,), 8, 2)
        mixed = self.forward("mm.qkv", (normed,), 24, 60)
        parts = tuple(
            self.forward(f"split.{name}", (mixed,), 8, 1, saves=False) for name in ("q", "k", "v")
        )
        attended = self.forward("attention", parts, 8, 40)
        projected = self.forward("mm.out", (attended,), 8, 20)
        dropped = self.forward("dropout", (projected,), 8, 2, saves=False)
        middle = self.forward("add", (x, dropped), 8, 1, saves=False)
        normed = self.forward("layer_norm", (middle,), 8, 2)
        wide = self.forward("mm.up", (normed,), 32, 80)
        active = self.forward("gelu", (wide,), 32, 3)
        narrow = self.forward("mm.down", (active,), 8, 80)
        dropped = self.forward("dropout", (narrow,), 8, 2, saves=False)
        return self.forward("add", (middle, dropped), 8, 1, saves=False)

    def backward(self, output: int, entry: int) -> None:
        incoming = {output: self.value(8 * MIB, role="tangent", segment=1)}
        for step in reversed(self.steps):
            gradient = incoming.pop(step.write)
            weighted = step.name.startswith("mm")
            if weighted:
                weight = self.value(4 * MIB, role="gradient", fate="handed_over")
                reads = (gradient, *step.saved)
                self.op(f"{step.name}.weight", reads, weight, step.cost, segment=1)
            reads = (gradient,) if weighted else (gradient, *step.saved)
            for read in step.reads:
                if read == entry:
                    continue
                part = self.value(self.values[read].size_bytes)
                self.op(f"{step.name}.input", reads, part, step.cost / len(step.reads), segment=1)
                if read in incoming:
                    total = self.value(self.values[read].size_bytes)
                    self.op("sum", (incoming[read], part), total, 1, segment=1)
                    part = total
                incoming[read] = part


def transformer_chain(ops: int) -> Graph:
    """Return a step of about so many ops."""
    builder = _Builder()
    x = entry = builder.value(8 * MIB, role="input")
    for _ in range(max(1, round(ops / OPS_PER_LAYER))):
        x = builder.layer(x)
    builder.values[x] = Value(id=x, name="output", size_bytes=8 * MIB, fate="returned")
    builder.backward(x, entry)
    return validate_graph(
        Graph(
            name="transformer_chain",
            values=tuple(builder.values),
            ops=tuple(builder.ops),
            segments=(Segment(id=0, phase="forward"), Segment(id=1, phase="backward")),
            constants_bytes={"inputs": 8 * MIB},
            cost_source="made up",
        )
    )
