"""One battery for every executor: a plan run for real holds exactly what the simulator says."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from support.models import CASES, EXECUTED, Case, Tied
from support.recompute import recompute_at_random
from tightfit.allocator import meter_for
from tightfit.capture.calls.structure import flatten
from tightfit.capture.captured import Captured, placeholder_tensors
from tightfit.capture.traced_call import TracedCall
from tightfit.execution.lower import lower
from tightfit.execution.runtime import Run, Runner
from tightfit.plan.assemble import assemble, keep_everything
from tightfit.plan.plan import Plan
from tightfit.plan.simulate import simulate
from tightfit.session.memory.surroundings import root_gradient_bytes
from tightfit.session.options import make_options
from tightfit.session.stages import capture_step

Executor = Callable[[Captured, Plan], Callable[[list[Any]], list[Any]]]


def lowered(captured: Captured, plan: Plan) -> Callable[[list[Any]], list[Any]]:
    """Generated forward and backward programs behind autograd."""
    runner = Runner(captured, lower(captured, plan))
    return lambda inputs: runner(inputs, Run())


EXECUTORS: dict[str, Executor] = {"lowered": lowered}


class ManyWords(Tied):
    """A vocabulary that the folded gradient takes in several stretches."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20_000, 16)
        self.head = nn.Linear(16, 20_000, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        scores = self.head(self.mix(self.embed(tokens)).tanh())
        return nn.functional.cross_entropy(scores.flatten(0, 1), tokens.flatten())


STEPS = [pytest.param(case, id=case.name) for case in CASES if case.name in EXECUTED]
LARGE = Case("many words", ManyWords, lambda: (torch.randint(0, 20_000, (3, 7)),))
STEPS.append(pytest.param(LARGE, id=LARGE.name))


def measured_step(execute: Callable[[list[Any]], list[Any]], inputs: list[Any]) -> int:
    """Return how far live memory rises during one forward and backward."""
    meter = meter_for("cpu")
    start = meter.live_bytes()
    meter.reset_peak()
    (loss,) = execute(inputs)
    loss.backward()
    return meter.peak_bytes() - start


@pytest.mark.parametrize("execute", EXECUTORS.values(), ids=EXECUTORS.keys())
@pytest.mark.parametrize("case", STEPS)
def test_measured_peaks_are_the_simulated_ones(case: Case, execute: Executor) -> None:
    torch.manual_seed(0)
    model, inputs = case.model(), case.inputs()
    call = TracedCall(model, {"model": model}, inputs, {})
    captured = capture_step(call, make_options("1GiB", costs="measured"), case.name)
    tensors = placeholder_tensors(captured.joint, {"model": model}, flatten((inputs, {}))[0])
    graph = captured.graph.with_constants(gradient_of_loss=root_gradient_bytes(captured))
    resident = captured.graph.constant_bytes
    # an op that draws random numbers is charged a generator state even if it runs only once
    states = max(op.random_state_bytes for op in graph.ops)
    for seed in range(-1, 6):
        computes = (
            keep_everything(graph)
            if seed < 0
            else recompute_at_random(graph, random.Random(seed), 0.5)
        )
        plan = assemble(graph, computes, budget_bytes=1 << 40)
        simulated = simulate(graph, plan).peak_bytes - resident
        run = execute(captured, plan)
        for _ in range(2):  # the first call loads kernels and their caches
            model.zero_grad(set_to_none=True)
            measured = measured_step(run, tensors)
        near = 0.01 * simulated
        assert measured - near <= simulated <= measured + near + states, f"schedule {seed}"
