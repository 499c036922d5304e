"""One rank that trains under DistributedDataParallel: ``python -m support.replicas RANK PORT``.

Each check trains a model twice, plainly and fitted, and compares every bit.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tightfit
from support.processes import end_rank, in_group
from support.searches import wait_for_searches
from tightfit.allocator import Meter, meter_for
from tightfit.errors import BadInput
from tightfit.execution.attach import attached
from tightfit.execution.run_state import RunState
from tightfit.graph.fingerprint import fingerprint
from tightfit.session import stages as pipeline
from tightfit.units import rounded_up

WIDTH, DEPTH, BATCH = 96, 6, 256


class Net(nn.Module):
    """Layers with something to recompute; one of them may be left unused."""

    def __init__(self, unused: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.spare = nn.Linear(WIDTH, WIDTH) if unused else None

    def forward(self, x):
        for layer in self.layers:
            x = x + F.gelu(F.dropout(layer(x).tanh(), 0.1))
        return self.norm(x).square().mean()


class NoGraph(nn.Module):
    """Asks numpy for an order, beyond any tracer; its blocks can be planned."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
            for _ in range(DEPTH)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        order = numpy.argsort(x.detach().sum(1).numpy())
        return x[torch.from_numpy(order)][:100].square().mean()


class Chatty(nn.Module):
    """Talks to the other ranks in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        y = self.layer(x)
        dist.all_reduce(y)
        return y


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(BATCH, WIDTH, generator=generator)


def lasting_bytes(
    model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[torch.Tensor]
) -> int:
    """Return what is held between steps: the wrapper's buckets and two notes of its own, too."""
    momentum = [t for state in optimizer.state.values() for t in state.values()]
    buckets = list(model.parameters())
    notes = [torch.empty(len(buckets), dtype=torch.int32)] * 2
    every = (*model.parameters(), *model.buffers(), *momentum, *losses, *buckets, *notes)
    return sum(rounded_up(t.nbytes, 64) for t in every if isinstance(t, torch.Tensor))


def wait_until_held(meter: Meter, most_bytes: int) -> None:
    """Wait until gloo's threads have let go of what they have sent.

    They wake whoever waits for a collective first, and let go when they run again: after the next
    step, once in seven runs on one core.
    """
    deadline = time.monotonic() + 60
    while (held := meter.live_bytes()) > most_bytes:
        assert time.monotonic() < deadline, f"{held} bytes are held, not {most_bytes}"
        time.sleep(0.001)


def train(
    rank: int, prepare: Callable[[nn.Module], Any], accumulate: int, unused: bool, **keywords: Any
) -> tuple[list[torch.Tensor], nn.Module, int]:
    """Return losses and final state, the model, and the most that was held from step 3 on.

    In step 2 the wrapper makes new buckets.
    """
    gc.collect()
    meter = meter_for("cpu")
    begin = meter.live_bytes()
    torch.manual_seed(0)
    model = Net(unused)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wrapper = DistributedDataParallel(model, bucket_cap_mb=0.05, **keywords)
    prepare(model, optimizer, wrapper)
    losses = []
    for step in range(4):
        torch.manual_seed(100 * step + rank)
        wait_until_held(meter, begin + lasting_bytes(model, optimizer, losses))
        if step == 2:
            meter.reset_peak()
        if step == 3:
            wait_for_searches(model)
        for micro in range(accumulate):
            last = micro == accumulate - 1
            with contextlib.nullcontext() if last else wrapper.no_sync():
                loss = wrapper(batch(rank, step))
                loss.backward()
            losses.append(loss.detach().clone())
            del loss
        optimizer.step()
        optimizer.zero_grad()
    peak = meter.peak_bytes() - begin
    return [*losses, *(t.detach().clone() for t in model.state_dict().values())], model, peak


def check_bits_and_peak(
    rank: int, accumulate: int = 1, unused: bool = False, **keywords: Any
) -> None:
    """Train plainly and inside a tight budget."""
    expected, _, eager_bytes = train(rank, lambda *_: None, accumulate, unused, **keywords)

    def fit(model: nn.Module, optimizer: Any, wrapper: Any) -> None:
        tightfit.fit(
            model, "1GiB", optimizer=optimizer, costs="unit", cache=False, limits=(0.2, 0.02)
        )
        least = tightfit.prepare(wrapper, batch(rank, 0))
        session = attached(model)
        held = least.constant_bytes
        budget_bytes = held + round(0.6 * (least.planned_peak_bytes - held))
        session.change_budget(budget_bytes)

    found, model, peak = train(rank, fit, accumulate, unused, **keywords)
    session = attached(model)
    budget_bytes = session.options.budget_bytes
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), keywords
    assert tightfit.report(model).overhead > 0
    # the losses that were kept are the test's own
    assert peak - 64 * 4 * accumulate <= budget_bytes < eager_bytes, (
        f"{keywords}: {peak} of {budget_bytes}, eager {eager_bytes}: {session.guard.steps}"
    )
    last = session.close_step()
    planned = tightfit.report(model).planned_peak_bytes
    assert 0.98 * planned <= last.program_bytes <= planned, (keywords, last)
    assert all(step.peak_bytes <= budget_bytes for step in session.guard.steps)
    plans = [None, None]
    report = tightfit.report(model)
    dist.all_gather_object(plans, (report.plan, fingerprint(session.last.graph)))
    assert plans[0] == plans[1], keywords


def check_parts(rank: int) -> None:
    """A model that allows no single graph, plainly and inside a tight budget."""
    results, steps = [], []
    for budget in (None, "2.5MiB"):
        torch.manual_seed(0)
        model = NoGraph()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if budget is not None:
            options = {"costs": "unit", "cache": False, "limits": (1, 0.02)}
            tightfit.fit(model, budget, optimizer=optimizer, **options)
        wrapper = DistributedDataParallel(model)
        losses = []
        for step in range(4):
            loss = wrapper(batch(rank, step))
            loss.backward()
            losses.append(loss.detach().clone())
            del loss
            optimizer.step()
            optimizer.zero_grad()
        results.append([*losses, *(p.detach().clone() for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    report = tightfit.report(model)
    steps = [step.peak_bytes for step in attached(model).guard.steps]
    assert report.overhead > 0 and max(steps) <= report.budget_bytes, steps
    plans = [None, None]
    dist.all_gather_object(plans, report.plans)
    assert plans[0] == plans[1]


def check_overlap(rank: int) -> None:
    """The first bucket is on its way before the backward program has ended."""
    model = tightfit.fit(Net(False), "1GiB", costs="unit", cache=False)
    wrapper = DistributedDataParallel(model, bucket_cap_mb=0.05)
    session, seen = attached(model), []

    def reduce(state, bucket):
        seen.extend(run.state for run in session.route.runs)
        return (
            dist.all_reduce(bucket.buffer().div_(2), async_op=True)
            .get_future()
            .then(lambda future: future.value()[0])
        )

    wrapper.register_comm_hook(None, reduce)
    for step in range(3):  # the buckets are as small as asked for from the second step on
        seen.clear()
        wrapper(batch(rank, step)).backward()
    assert len(seen) > 3 and seen[0] is seen[-2] is RunState.IN_BACKWARD, seen


def check_one_rank_measures(rank: int) -> None:
    """Operators are measured on one rank, in steps too; all run one plan with these costs."""
    priced, measure = [], pipeline.quick_costs

    def quick_costs(*arguments: Any, **keywords: Any) -> Any:
        priced.append(rank)
        return measure(*arguments, **keywords)

    pipeline.quick_costs = quick_costs
    model = tightfit.fit(Net(False), "1GiB", cache=False, limits=(0.2, 0.02))
    wrapper = DistributedDataParallel(model)
    for step in range(7):
        wrapper(batch(rank, step)).backward()
        wrapper.zero_grad()
    pipeline.quick_costs = measure
    everyone: list[Any] = [None, None]
    costs = [v.cost_s for op in attached(model).last.graph.ops for v in op.alternatives[0].variants]
    dist.all_gather_object(everyone, (priced, costs, tightfit.report(model).cost_source))
    assert sorted(map(len, (everyone[0][0], everyone[1][0]))) == [0, 1]
    assert everyone[0][1:] == everyone[1][1:] and everyone[0][2] == "measured in steps"


def check_the_least_budget_counts(rank: int) -> None:
    """Ranks that were given different budgets keep to the least of them."""
    model = tightfit.fit(Net(False), f"{rank + 1}GiB", costs="unit", cache=False)
    DistributedDataParallel(model)(batch(rank, 0)).backward()
    assert tightfit.report(model).budget_bytes == 1 << 30


def check_shapes_may_differ(rank: int) -> None:
    """A rank with a shorter batch plans for itself; no rank waits for one that does not come."""
    model = tightfit.fit(Net(False), "1GiB", costs="unit", cache=False)
    wrapper = DistributedDataParallel(model)
    for step in range(3):
        wrapper(batch(rank, step)[: 64 if rank and step == 1 else None]).backward()
    assert len(attached(model).specialisations) == 1 + rank


def check_arena(rank: int) -> None:
    """An arena on each rank; nothing is left of the budget, for ranks have to plan alike."""
    found: list[list[torch.Tensor]] = []
    for arena in (False, True):
        torch.manual_seed(0)
        model = Net(unused=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if arena:
            tightfit.fit(model, "1GiB", optimizer=optimizer, costs="unit", cache=False, arena=True)
        wrapper = DistributedDataParallel(model)
        for step in range(6):
            torch.manual_seed(100 * step + rank)
            wrapper(batch(rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([t.detach().clone() for t in model.state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    report = tightfit.report(model)
    assert report.arena.exact_steps >= 1 and report.held is None, report.arena


def refuses(error: type[Exception], words: str, run: Callable[[], Any]) -> None:
    """Check that something is refused with these words, in order."""
    with pytest.raises(error, match=f"(?s){words}"):
        run()


def check_communicating(rank: int) -> None:
    """What talks to other ranks in its forward runs outside of plans, and right."""
    x = torch.randn(4, 4) + rank
    plain = Chatty()
    fitted = tightfit.fit(copy.deepcopy(plain), "1GiB", costs="unit")
    found = []
    for model in (plain, fitted):
        output = model(x)
        output.square().sum().backward()
        found.append([output, *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *found))
    assert tightfit.report(fitted).outside


def check_refused(rank: int) -> None:
    """What a plan cannot hold is refused by name."""
    x = torch.randn(4, 4)
    fit = {"budget": "1GiB", "costs": "unit"}
    synchronised = nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4))
    fitted = tightfit.fit(synchronised, **fit)
    refuses(ValueError, "expected input.*GPU", lambda: fitted(x))  # as plain PyTorch says
    wrapper = DistributedDataParallel(nn.Linear(4, 4))
    refuses(BadInput, "inner module", lambda: tightfit.fit(wrapper, **fit))
    refuses(BadInput, "returns the loss", lambda: tightfit.step(wrapper, modules=wrapper, **fit))
    reserve = tightfit.fit(nn.Linear(4, 4), **fit, reserve=rank + 1)
    wrapper = DistributedDataParallel(reserve)
    refuses(BadInput, "reserves of 1 B, 2 B.*the same", lambda: wrapper(x))


DATA_PARALLEL: dict[str, Callable[[int], None]] = {
    "gradients as views of buckets": lambda rank: check_bits_and_peak(
        rank, gradient_as_bucket_view=True
    ),
    "a static graph": lambda rank: check_bits_and_peak(
        rank, static_graph=True, gradient_as_bucket_view=True
    ),
    "unused parameters": lambda rank: check_bits_and_peak(
        rank, unused=True, find_unused_parameters=True
    ),
    "accumulation under `no_sync`": lambda rank: check_bits_and_peak(
        rank, accumulate=2, gradient_as_bucket_view=True
    ),
    "reduction while the backward goes on": check_overlap,
    "one plan, from costs of one rank": check_one_rank_measures,
    "the least of different budgets": check_the_least_budget_counts,
    "different shapes on different ranks": check_shapes_may_differ,
    "a model that allows no single graph": check_parts,
    "an arena on every rank": check_arena,
}
"""What is tested with two ranks, by name: a row each of docs/features.md."""


def main(rank: int, port: int) -> None:
    """Run every check; the first failure ends the rank."""
    torch.set_num_threads(1)
    with in_group(rank, port):
        for check in (*DATA_PARALLEL.values(), check_communicating, check_refused):
            check(rank)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
    end_rank()
