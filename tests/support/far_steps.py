"""Captured steps of models that run by plans with moves."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from hypothesis import strategies as st

from support.models import CASES
from support.moves import with_moves
from support.recompute import recompute_at_random
from tightfit.allocator import meter_for
from tightfit.capture.calls.structure import flatten
from tightfit.capture.captured import Captured, placeholder_tensors
from tightfit.capture.traced_call import TracedCall
from tightfit.execution.far.file import FileStep
from tightfit.execution.far.offload import Offload
from tightfit.execution.far.step import FarStep, Moved, moving_program
from tightfit.execution.lower import lower
from tightfit.execution.runtime import Run, Runner
from tightfit.plan import Far, Free, Load, Plan, Store
from tightfit.plan.assemble import assemble, keep_everything
from tightfit.plan.simulate import simulate
from tightfit.plan.verify import verify
from tightfit.planners.moves.gaps import gaps_of
from tightfit.session.memory.surroundings import root_gradient_bytes
from tightfit.session.options import make_options
from tightfit.session.stages import capture_step

LINK = Far(capacity_bytes=1 << 30, store_bytes_per_s=1e9, load_bytes_per_s=1e9)


class Step:
    """A captured step of a model, and its inputs."""

    def __init__(self, name: str) -> None:
        case = next(case for case in CASES if case.name == name)
        torch.manual_seed(0)
        self.model, inputs = case.model(), case.inputs()
        call = TracedCall(self.model, {"model": self.model}, inputs, {})
        self.captured: Captured = capture_step(call, make_options("1GiB", costs="unit"), name)
        leaves = flatten((inputs, {}))[0]
        self.tensors = placeholder_tensors(self.captured.joint, {"model": self.model}, leaves)
        root = root_gradient_bytes(self.captured)
        self.graph = self.captured.graph.with_constants(gradient_of_loss=root)

    def run(
        self, plan: Plan, begin: Callable[[], FarStep] | None = None
    ) -> tuple[list[torch.Tensor], int, Moved | None]:
        """Run a plan; return loss and gradients, the rise of live memory, and what was moved.

        `begin`: returns the far memory of a step; None: a file.
        """
        program, moved = lower(self.captured, plan), []
        if plan.far is not None:
            begin = begin or partial(FileStep, Offload(plan.far.capacity_bytes))
            program = moving_program(program, begin, lambda read: moved.append(read()))
        runner = Runner(self.captured, program)
        self.model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        meter = meter_for("cpu")
        start = meter.live_bytes()
        meter.reset_peak()
        (loss,) = runner(self.tensors, Run())
        loss.backward()
        rise = meter.peak_bytes() - start
        found = [loss.detach(), *(p.grad for p in self.model.parameters() if p.grad is not None)]
        return found, rise, moved[0] if moved else None


step_of = lru_cache(maxsize=None)(Step)


def random_moves(step: Step, data: st.DataObject, seed: int) -> tuple[Plan, Plan]:
    """Draw a plan with moves and recomputations; return that which keeps everything, too."""
    graph = step.graph
    computes = recompute_at_random(graph, random.Random(seed), 0.3)
    plain = assemble(graph, keep_everything(graph), budget_bytes=1 << 40)
    steps = data.draw(with_moves(graph, computes))
    has_moves = any(isinstance(each, Store) for each in steps)
    plan = assemble(graph, steps, budget_bytes=1 << 40, far=LINK if has_moves else None)
    verify(plan, graph)
    return plain, plan


def check_peak(step: Step, plan: Plan, rise: int, moved: Moved | None) -> None:
    """Check that measured bytes, near and far, are those of the simulator."""
    result = simulate(step.graph, plan)
    simulated = result.peak_bytes - step.captured.graph.constant_bytes
    states = max(op.random_state_bytes for op in step.graph.ops)
    near = 0.01 * simulated
    assert rise - near <= simulated <= rise + near + states
    if moved is not None:
        assert moved.stored_bytes + moved.loaded_bytes <= result.moved_bytes


def one_move(step: Step) -> Plan:
    """Return a plan that stores a value in the forward and loads it in the backward."""
    graph = step.graph
    move = max(
        gaps_of(graph, list(range(len(graph.ops) + 1))).values(), key=lambda g: g.before - g.after
    )
    steps: list[Any] = []
    for each in keep_everything(graph):
        steps += [Load(move.value)] * (each.op == move.before)
        steps.append(each)
        steps += [Store(move.value)] * (each.op == move.made)
        steps += [Free(move.value)] * (each.op == move.after)
    plan = assemble(graph, steps, budget_bytes=1 << 40, far=LINK)
    verify(plan, graph)
    return plan
