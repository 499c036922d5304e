"""A lowered plan compiled by Inductor: the same program as fused kernels.

Inductor decides order and fusion inside a graph, never which values are kept between forward and
backward or computed again. Bytes therefore follow the plan roughly, not exactly: measure them.
Results differ from eager by rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from tightfit.allocator.devices import get_state, set_state
from tightfit.capture.captured import Captured
from tightfit.capture.opaque.ops import OpaqueBackward, OpaqueForward
from tightfit.errors import CompileError
from tightfit.execution.compiled.pieces import cut
from tightfit.execution.compiled.tracing import (
    Constant,
    TracedProgram,
    explained,
    results_of,
    trace_program,
)
from tightfit.execution.lower import Program, write_back
from tightfit.execution.replanned import laid_out
from tightfit.torch_private import inductor as private
from tightfit.torch_private.core import storage_key


def refuse_uncompilable(captured: Captured) -> None:
    """Refuse by name ops that a compiled step cannot contain.

    Raises `CompileError` for opaque modules and computed values that decide.
    """
    for op, calls in zip(captured.graph.ops, captured.calls, strict=True):
        where = f"module {op.module!r}" if op.module else "the outermost forward"
        if any(isinstance(call.function, OpaqueForward | OpaqueBackward) for call in calls):
            raise CompileError(
                f"{where} runs eagerly, as one opaque op, and cannot be compiled. Way out: "
                "compile=False, or leave this module out of the fitted part"
            )


def compile_program(captured: Captured, program: Program, pieces: int = 1) -> Program:
    """Return the program of a lowered plan, compiled.

    `pieces`: into how many graphs the backward pass is cut, at most; between them finished
    gradients are handed over. Raises `CompileError` if the step holds an op that cannot be
    compiled, or Inductor fails.
    """
    refuse_uncompilable(captured)
    traced = trace_program(captured, program)
    ends = _ends(traced, pieces)
    with explained("compiled"):
        forward = _Forward(traced)
        backward = _Backward(traced, ends)
    groups = tuple(
        tuple(p for group in program.groups[first:last] for p in group)
        for first, last in zip((0, *ends), ends, strict=False)
    )
    return Program(
        forward=forward,
        backward=backward,
        groups=groups,
        late_reads=_late_reads(program, ends, groups),
        source=program.source,
        names=program.names,
    )


def _ends(traced: TracedProgram, pieces: int) -> list[int]:
    """Return behind which groups the backward graph is cut: gradients of about equal bytes."""
    sizes = [
        sum(node.meta["val"].untyped_storage().nbytes() for node in nodes)
        for nodes in traced.gradients
    ]
    total, done, ends = sum(sizes), 0, []
    for index, size in enumerate(sizes):
        done += size
        if done * pieces >= total * (len(ends) + 1) and index + 1 < len(sizes):
            ends.append(index + 1)
    return [*ends[: pieces - 1], len(sizes)]


def _late_reads(
    program: Program, ends: Sequence[int], groups: Sequence[Sequence[int]]
) -> tuple[tuple[int, int], ...]:
    """Return the last piece before which a placeholder is read after its gradient is handed over.

    The last group before which the program reads it is in some piece, which reads it as a whole.
    """
    handed = {position: number for number, group in enumerate(groups) for position in group}
    late: list[tuple[int, int]] = []
    for position, last in program.late_reads:
        piece = next(n for n, end in enumerate(ends) if last < end or n + 1 == len(ends))
        if piece > handed[position]:
            late.append((position, piece))
    return tuple(late)


class _Forward:
    """The compiled forward pass, in the shape of a lowered pass."""

    def __init__(self, traced: TracedProgram) -> None:
        forward = traced.forward
        self.run = private.compile_graph(forward.module, backward=False)
        self.inputs = traced.inputs
        self.constants = traced.constants
        self.device = traced.device
        self.returned, self.kept, self.written = forward.returned, forward.kept, forward.written

    def __call__(self, inputs: list[Any]) -> tuple[list[Any], list[Any]]:
        """Run on the placeholder tensors, a list that is emptied; return (outputs, kept)."""
        given = list(inputs)
        inputs.clear()
        arguments = [given[i] for i in self.inputs]
        *outputs, state = self.run([*arguments, *self.constants, get_state(self.device)])
        set_state(self.device, state)
        if self.written:
            buffers, values = zip(*((given[p], outputs[s]) for p, s in self.written), strict=True)
            write_back(buffers, values)
        kept = [given[k.index] if k.is_input else outputs[k.index] for k in self.kept]
        returned = [x.value if isinstance(x, Constant) else outputs[x] for x in self.returned]
        mine = {id(x) for x in returned}
        return returned, [x.detach() if id(x) in mine else x for x in kept]


class _Backward:
    """The compiled pieces of the backward pass, in the shape of a lowered pass."""

    def __init__(self, traced: TracedProgram, ends: Sequence[int]) -> None:
        groups = [
            [node for nodes in traced.gradients[first:last] for node in nodes]
            for first, last in zip((0, *ends), ends, strict=False)
        ]
        self.gradients = [tuple(node.name for node in group) for group in groups]
        self.pieces = cut(traced.backward, groups)
        self.placeholders = [n.name for n in _placeholders(traced.backward)]
        self.constants = traced.constants
        self.layouts = [(t.shape, t.stride()) for t in traced.tangents]
        self.last_use: list[set[str]] = []  # names each piece is the last to read
        later: set[str] = set()
        for piece, names in zip(reversed(self.pieces), reversed(self.gradients), strict=True):
            self.last_use.insert(0, set(piece.inputs) - later)
            later |= {*piece.inputs, *names}
        own = _owned(traced)
        self.runs = [
            private.compile_graph(
                piece.module,
                backward=True,
                donated=[i for i, name in enumerate(piece.inputs) if name in own and name in last],
            )
            for piece, last in zip(self.pieces, self.last_use, strict=True)
        ]

    def __call__(
        self, saved: list[torch.Tensor], tangents: list[torch.Tensor]
    ) -> Iterator[list[torch.Tensor]]:
        """Run on kept values and the outputs' gradients, both emptied; yield gradients."""
        ready = [laid_out(t, *to) for t, to in zip(tangents, self.layouts, strict=True)]
        tangents.clear()
        values = dict(zip(self.placeholders, [*saved, *ready, *self.constants], strict=True))
        saved.clear()
        ready.clear()
        for piece, run, names, last in zip(
            self.pieces, self.runs, self.gradients, self.last_use, strict=True
        ):
            arguments = [values.pop(n) if n in last else values[n] for n in piece.inputs]
            values.update(zip(piece.outputs, run(arguments), strict=True))
            gradients = [values.pop(name) for name in names]
            yield gradients
            del gradients


def _owned(traced: TracedProgram) -> set[str]:
    """Return the placeholders of the backward graph that only it holds, each in its own memory."""
    forward = traced.forward
    keys = [storage_key(node.meta["val"]) for node in results_of(forward.module)]
    others = [storage_key(n.meta["val"]) for n in _placeholders(forward.module)]
    others += [keys[x] for x in forward.returned if isinstance(x, int)]
    kept = [None if k.is_input else keys[k.index] for k in forward.kept]
    names = (node.name for node in _placeholders(traced.backward))
    return {  # later placeholders of the backward graph, tangents and constants, are not ours
        name
        for name, key in zip(names, kept, strict=False)
        if key is not None and key not in others and kept.count(key) == 1
    }


def _placeholders(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "placeholder"]
