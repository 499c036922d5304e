"""Trace the generated program of a plan into two functional graphs, for a compiler.

The code is run once on fake tensors. Operators computed twice stay twice, and values that the plan
keeps for the backward pass are outputs of the forward graph. Nothing is hidden: states of
generators are arguments, new contents of buffers are outputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tightfit.allocator.devices import get_state
from tightfit.capture.captured import Captured
from tightfit.errors import CompileError, TightfitError
from tightfit.execution.compiled.random_state import GeneratorState
from tightfit.execution.lower import Program
from tightfit.torch_private import inductor as private
from tightfit.torch_private.core import FakeTensorMode, like


@dataclass(frozen=True)
class Constant:
    """An output that is no tensor."""

    value: Any


@dataclass(frozen=True)
class Saved:
    """A tensor for the backward: an input of the step or an output of the forward graph."""

    index: int
    is_input: bool


@dataclass(frozen=True)
class TracedForward:
    # Takes the tensors among the inputs, the constants, the generator's state
    module: fx.GraphModule
    # For each raw output its position among the graph's outputs
    returned: tuple[int | Constant, ...]
    kept: tuple[Saved, ...]  # in the order in which the backward graph takes them
    # The input that is written to, and the position of its new content among the outputs
    written: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class TracedProgram:
    """Both graphs of a plan."""

    forward: TracedForward  # the last output of its graph is the generator's next state
    backward: fx.GraphModule  # takes kept values, tangents, constants
    # The outputs of the backward graph, by the groups of the program
    gradients: tuple[tuple[fx.Node, ...], ...]
    inputs: tuple[int, ...]  # which inputs of the step are tensors
    constants: tuple[torch.Tensor, ...]  # further inputs of both graphs
    tangents: tuple[torch.Tensor, ...]  # fakes of the gradients of the outputs
    device: torch.device  # where random numbers are drawn


def trace_program(captured: Captured, program: Program) -> TracedProgram:
    """Return the graphs of a lowered plan.

    Raises `CompileError` if something in the program cannot be traced.
    """
    return _Tracing(captured, program).run()


@contextlib.contextmanager
def explained(action: str) -> Iterator[None]:
    """Turn any failure inside into an error with its cause and a way out."""
    try:
        yield
    except TightfitError:
        raise
    except Exception as error:  # a compiler may fail in any way
        text = str(error).strip().splitlines()
        raise CompileError(
            f"the planned step cannot be {action}: {type(error).__name__}: "
            f"{text[0][:300] if text else ''}. Way out: compile=False runs the same plan operator "
            "by operator"
        ) from error


class _Tracing:
    def __init__(self, captured: Captured, program: Program) -> None:
        self.program = program
        self.mode = FakeTensorMode()
        joint = captured.joint
        self.given: list[Any] = []
        self.tangents: list[torch.Tensor] = []
        for node, source in zip(joint.placeholders, joint.sources, strict=True):
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                value = like(value, mode=self.mode)
            (self.tangents if source.kind == "tangent" else self.given).append(value)
        self.constants = {k: v for k, v in program.names.items() if isinstance(v, torch.Tensor)}
        self.inputs = [i for i, x in enumerate(self.given) if isinstance(x, torch.Tensor)]
        devices = [self.given[i].device for i in self.inputs if self.given[i].is_cuda]
        self.device = devices[0] if devices else torch.device("cpu")

    def run(self) -> TracedProgram:
        with explained("traced for the compiler"):
            forward = self._forward()
            backward, gradients = self._backward(self._kept_values(forward))
        return TracedProgram(
            forward,
            backward,
            gradients,
            tuple(self.inputs),
            tuple(self.constants.values()),
            tuple(self.tangents),
            self.device,
        )

    def _forward(self) -> TracedForward:
        tensors = [self.given[i] for i in self.inputs]
        found: dict[str, Any] = {}

        def traced(*flat: torch.Tensor) -> list[torch.Tensor]:
            inputs = list(self.given)
            for i, tensor in zip(self.inputs, flat, strict=False):
                inputs[i] = tensor
            position = {id(inputs[i]): i for i in self.inputs}
            generator = GeneratorState(flat[-1])
            written: list[tuple[int, torch.Tensor]] = []

            def write_back(
                targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
            ) -> None:
                written.extend((position[id(t)], s) for t, s in zip(targets, sources, strict=True))

            forward, _ = self._functions(flat[len(tensors) : -1], generator, write_back)
            with generator:
                raw, saved = forward(list(inputs))
            outputs: list[torch.Tensor] = []

            def output(x: torch.Tensor) -> int:
                outputs.append(x)
                return len(outputs) - 1

            found["returned"] = tuple(
                output(x) if isinstance(x, torch.Tensor) else Constant(x) for x in raw
            )
            found["kept"] = tuple(
                Saved(position[id(x)], True) if id(x) in position else Saved(output(x), False)
                for x in saved
            )
            found["written"] = tuple((place, output(x)) for place, x in written)
            return [*outputs, generator.state]

        fakes = self._fakes([*tensors, *self.constants.values(), get_state(self.device)])
        return TracedForward(private.trace_functional(traced, fakes, self.mode), **found)

    def _kept_values(self, forward: TracedForward) -> list[torch.Tensor]:
        outputs = results_of(forward.module)
        return [
            self.given[kept.index] if kept.is_input else outputs[kept.index].meta["val"]
            for kept in forward.kept
        ]

    def _backward(
        self, kept: Sequence[torch.Tensor]
    ) -> tuple[fx.GraphModule, tuple[tuple[fx.Node, ...], ...]]:
        first, last = len(kept), len(kept) + len(self.tangents)
        counts: list[int] = []

        def traced(*flat: torch.Tensor) -> list[torch.Tensor]:
            # draws that are repeated begin by setting the state; nothing is drawn here
            generator = GeneratorState(torch.empty(0, dtype=torch.uint8))
            _, backward = self._functions(flat[last:], generator, None)
            counts.clear()
            gradients: list[torch.Tensor] = []
            with generator:
                for group in backward(list(flat[:first]), list(flat[first:last])):
                    counts.append(len(group))
                    gradients.extend(group)
            return gradients

        fakes = self._fakes([*kept, *self.tangents, *self.constants.values()])
        module = private.trace_functional(traced, fakes, self.mode)
        nodes = iter(results_of(module))
        return module, tuple(tuple(next(nodes) for _ in range(n)) for n in counts)

    def _functions(
        self, constants: Sequence[torch.Tensor], generator: GeneratorState, write_back: Any
    ) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Return the program's functions with traced tensors in place of outside names."""
        names: dict[str, Any] = dict(self.program.names)
        names |= dict(zip(self.constants, constants, strict=True))
        names |= {"get_state": generator.get, "set_state": generator.set}
        names |= {"write_back": write_back, "write_statistics": write_back}
        exec(compile(self.program.source, "<traced by tightfit>", "exec"), names)
        return names["forward"], names["backward"]

    def _fakes(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [like(t, mode=self.mode) for t in tensors]


def results_of(module: fx.GraphModule) -> list[fx.Node]:
    return list(module.graph.output_node().args[0])
