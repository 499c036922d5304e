"""Fitted models compute what plain PyTorch computes, bit for bit, whatever is recomputed.

That their own plans do is tested with the features of models (`features/test_models.py`).
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn

import tightfit
from support.models import CASES, Case
from support.recompute import recompute_at_random
from tightfit.capture.captured import Captured
from tightfit.execution.attach import attached
from tightfit.execution.lower import lower
from tightfit.execution.runtime import Runner
from tightfit.graph.ir import Graph
from tightfit.plan import assemble
from tightfit.plan.verify import verify
from tightfit.planners.base import Task
from tightfit.planners.orders.problem import step_orders
from tightfit.planners.orders.reorder import in_traced_order, reorder
from tightfit.session.parts.kinds import Kind
from tightfit.session.whole.specialisation import Planned

BY_NAME = [pytest.param(case, id=case.name) for case in CASES]


def train_step(case: Case, model, inputs, seed: int) -> list[torch.Tensor | None]:
    """Run one step; return everything it changed, the next random number included."""
    model.zero_grad(set_to_none=True)
    inputs_with_gradient = [x for x in inputs if isinstance(x, torch.Tensor)]
    for tensor in inputs_with_gradient:
        tensor.grad = None
    torch.manual_seed(seed)
    context = (
        torch.autocast("cpu", dtype=torch.bfloat16) if case.autocast else contextlib.nullcontext()
    )
    with context:
        loss = case.loss(case.call(model, inputs))
    loss.backward()
    changed = [loss.detach().clone(), torch.rand(1)]
    changed += [p.grad for p in model.parameters()] + [t.grad for t in inputs_with_gradient]
    return changed + [b.clone() for b in model.buffers()]


def assert_equal(mine, reference) -> None:
    for a, b in zip(mine, reference, strict=True):
        assert (a is None) == (b is None)
        for part, other in zip(_parts(a), _parts(b), strict=True):
            assert torch.equal(part, other)


def _parts(tensor: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    if tensor is None:
        return ()
    return (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", BY_NAME)
def test_any_recomputation_equals_plain_pytorch(case: Case):
    """Random plans, far from any planner's: every value may be dropped and made again.

    Half of them run the ops in another order, too.
    """
    torch.manual_seed(0)
    plain = case.model()
    inputs = case.inputs()
    fitted = tightfit.fit(copy.deepcopy(plain), "1GiB", costs="unit")
    own_inputs = copy.deepcopy(inputs)
    for step in range(2):
        train_step(case, fitted, own_inputs, step)
        train_step(case, plain, inputs, step)
    for seed, every in enumerate(zip(*map(random_runners, planned_in(fitted)), strict=True)):
        for put in every:
            put()
        reference = train_step(case, plain, inputs, seed)
        assert_equal(train_step(case, fitted, own_inputs, seed), reference)


@dataclass(frozen=True)
class PlannedGraph:
    """One planned graph of a fitted model, and what has a plan of it run from now on."""

    graph: Graph
    captured: Captured
    put: Callable[[Runner], None]


def planned_in(fitted: nn.Module) -> list[PlannedGraph]:
    """Return the graphs of the last step: one, or those of a model of several."""
    session = attached(fitted)
    session.settle()
    if session.is_in_parts:
        ledger, _ = session.route.steps._last_step()
        return [
            PlannedGraph(kind.captured.graph, kind.captured, partial(_run_always, kind))
            for kind in dict.fromkeys(ledger.calls)
        ]
    shape = session.specialisations[-1]
    key, planned = list(shape.plans.items())[-1]

    def put(runner: Runner) -> None:
        shape.add_plan(key, Planned(planned.graph, planned.outcome, runner))

    return [PlannedGraph(planned.graph, shape.captured, put)]


def _run_always(kind: Kind, runner: Runner) -> None:
    kind.runner = lambda holding: runner


def random_runners(one: PlannedGraph) -> Iterator[Callable[[], None]]:
    """Yield what has a random plan of a graph run from now on: two in its order, two in others."""
    orders = step_orders(Task(graph=one.graph, budget_bytes=0))
    listed = (orders.core.scheduled_forwards(), orders.core.scheduled_backwards())
    for seed, order in enumerate(map(orders.to_graph, (orders.traced(),) * 2 + listed)):
        graph = reorder(one.graph, order)
        computes = in_traced_order(recompute_at_random(graph, random.Random(seed)), order)
        plan = assemble(one.graph, computes, budget_bytes=1 << 40)
        verify(plan, one.graph)
        yield partial(one.put, Runner(one.captured, lower(one.captured, plan)))
