"""Opaque modules: eager inside, one measured op outside."""

from __future__ import annotations

import collections
import copy
import pickle
import re
from typing import Any

import pytest
import torch
from torch import nn

import tightfit
from support.releases import needs
from tightfit.errors import BadInput, CaptureError
from tightfit.execution.attach import attached
from tightfit.studies.dry_step import graph_of
from tightfit.torch_private.releases import LEAVES


class Wide(nn.Module):
    """Keeps eight times its input for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 128)
        self.down = nn.Linear(128, 32)

    def forward(self, x):
        return x + self.down(nn.functional.dropout(self.up(x).tanh(), 0.2))


class Tower(nn.Module):
    def __init__(self, block=Wide, depth: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.head = nn.Linear(32, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def opaque_tower(block=Wide) -> Tower:
    model = Tower(block)
    for each in model.blocks:
        tightfit.opaque(each)
    return model


def train(model: nn.Module, optimizer, inputs) -> list[torch.Tensor]:
    losses = []
    for seed, x in enumerate(inputs):
        torch.manual_seed(seed)
        loss = model(x)
        loss.backward()
        losses.append(loss.detach().clone())
        del loss
        optimizer.step()
        optimizer.zero_grad()
    return losses + [p.detach().clone() for p in model.parameters()]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@needs(LEAVES)
@pytest.mark.parametrize("share", [1.0, 0.6, 0.0])
def test_training_in_a_budget_is_exact_and_stays_inside(share: float) -> None:
    """From plenty of memory, where nothing is computed twice, to the least there is."""
    inputs = [torch.randn(64, 32) for _ in range(7)]
    plain = Tower()
    reference = train(plain, sgd(plain), inputs)
    model = opaque_tower()
    optimizer = sgd(model)
    options = {"optimizer": optimizer, "cache": False}
    tightfit.fit(model, "1GiB", **options)
    most = tightfit.prepare(model, inputs[0]).planned_peak_bytes
    least = attached(model).smallest_budget((inputs[0],), {}).found_bytes
    budget = round(least + share * (most - least)) + 4096
    tightfit.unfit(model)
    tightfit.fit(model, budget, **options)
    trained = train(model, optimizer, inputs)
    assert all(torch.equal(a, b) for a, b in zip(trained, reference, strict=True))
    report = tightfit.report(model)
    assert report.measured_peak_bytes is not None
    assert report.measured_peak_bytes <= report.planned_peak_bytes <= budget
    assert report.overhead <= 0.01 if share == 1 else report.overhead > 0


@needs(LEAVES)
def test_each_block_is_one_op_forward_and_one_backward() -> None:
    model = tightfit.fit(opaque_tower(), "1GiB", costs="unit")
    tightfit.prepare(model, torch.randn(4, 32))
    graph = attached(model).specialisations[0].captured.graph
    targets = [op.target for op in graph.ops]
    assert targets.count("tightfit.opaque_forward") == 4
    assert targets.count("tightfit.opaque_backward") == 4
    assert "aten.tanh" not in targets
    assert {op.module for op in graph.ops if "opaque" in op.target} == {
        f"blocks.{i}" for i in range(4)
    }


def test_measuring_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(8, 8), tightfit.opaque(nn.BatchNorm1d(8)), nn.Linear(8, 1))
    before = copy.deepcopy(model.state_dict())
    tightfit.fit(model, "1GiB")
    x = torch.randn(4, 8)
    generator = torch.get_rng_state()
    tightfit.prepare(model, x)
    assert torch.equal(generator, torch.get_rng_state())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert "forward" not in vars(model[1])
    assert all(p.grad is None for p in model.parameters())


def test_the_mark_survives_copies_and_is_no_public_attribute() -> None:
    block = tightfit.opaque(Wide())
    assert not [k for k in vars(block) if not k.startswith("_") and k != "training"]
    for copied in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        model = tightfit.fit(nn.Sequential(copied, nn.Linear(32, 1)), "1GiB", costs="unit")
        tightfit.prepare(model, torch.randn(4, 32))
        assert attached(model).specialisations


class Recorder(nn.Module):
    """Keeps more for backward for larger values."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(32, 32)

    def forward(self, x):
        for _ in range(1 + (5 if x.sum() > 1e5 else 0)):
            x = self.a(x).tanh()
        return x


def trained(model: nn.Module, x: torch.Tensor) -> list[Any]:
    """Return the loss and the gradients of a step."""
    model.zero_grad()
    loss = model(x)
    loss.backward()
    return [loss, *(p.grad for p in model.parameters())]


@needs(LEAVES)
def test_a_block_that_keeps_more_than_was_measured_gets_a_new_plan(capsys) -> None:
    model = Tower(Recorder)
    plain = copy.deepcopy(model)
    for block in model.blocks:
        tightfit.opaque(block)
    tightfit.fit(model, "1GiB", costs="unit")
    for scale in (1.0, 1.0, 1e9, 1.0):
        x = torch.randn(16, 32).abs() * scale
        assert all(map(torch.equal, trained(plain, x), trained(model, x)))
    assert "'blocks.0' kept" in capsys.readouterr().err


class Skipping(Wide):
    def forward(self, x):
        return x if torch.rand(1) < 0.5 else super().forward(x)


@needs(LEAVES)
def test_a_block_that_is_left_out_by_draws_has_room_to_run(capsys) -> None:
    plain = Tower(Skipping)
    fitted = opaque_tower(Skipping)
    x = torch.randn(64, 32, requires_grad=True)
    inputs = [x] * 8
    expected = train(plain, sgd(plain), inputs)
    tightfit.fit(fitted, "1GiB", optimizer=sgd(fitted), costs="unit", cache=False)
    tightfit.prepare(fitted, x)
    budget = attached(fitted).smallest_budget((x,), {}).found_bytes + 64 * len(inputs)  # losses
    tightfit.unfit(fitted)
    tightfit.fit(fitted, budget, optimizer=sgd(fitted), costs="unit", cache=False)
    tightfit.prepare(fitted, x)  # looking at a block by itself takes more than the least budget
    found = train(fitted, sgd(fitted), inputs)
    assert all(map(torch.equal, found, expected))
    session = attached(fitted)
    session.close_step()
    assert len(session.guard.steps) == 8
    assert max(step.peak_bytes for step in session.guard.steps) <= budget
    assert "making a new plan" not in capsys.readouterr().err


class Counting(Wide):
    """Counts its calls and remembers what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.seen = []

    def forward(self, x):
        self.calls += 1
        self.seen.append(x.shape[0])
        return super().forward(x)


@needs(LEAVES)
def test_what_a_block_counts_asks_for_no_new_plan(capsys) -> None:
    model = opaque_tower(Counting)
    tightfit.fit(model, "1GiB", costs="unit")
    for _ in range(3):
        model(torch.randn(16, 32)).backward()
    assert model.blocks[1].calls == len(model.blocks[1].seen) == 3
    assert len(attached(model).specialisations) == 1
    assert "new plan" not in capsys.readouterr().err


class Saving(torch.autograd.Function):
    """Keeps a tensor where no hook sees it, as kernels of other libraries do."""

    @staticmethod
    def forward(ctx, x):
        ctx.kept = x.exp()
        return ctx.kept * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.kept * 2


class Hidden(nn.Module):
    def forward(self, x):
        return Saving.apply(x * 0.1)


@needs(LEAVES)
def test_what_hooks_do_not_see_is_counted_too() -> None:
    model = nn.Sequential(nn.Linear(32, 32), tightfit.opaque(Hidden()), nn.Linear(32, 1))
    tightfit.fit(model, "1GiB", cache=False)
    x = torch.randn(64, 32)
    for _ in range(6):
        model.zero_grad()
        model(x).sum().backward()
    captured = attached(model).specialisations[0].captured
    (block,) = captured.joint.opaque.calls
    factor = 64  # that of the multiplication inside, kept for its backward
    assert block.profile.record_bytes == 64 * 32 * 4 + factor
    report = tightfit.report(model)
    assert report.measured_peak_bytes <= report.planned_peak_bytes


class Overwriting(nn.Module):
    def forward(self, x):
        return x.mul_(2) + 1


class Resizing(nn.Module):
    def forward(self, x):
        return x[x[:, 0] > 0] * 2


class Failing(nn.Module):
    """Fails for the values it is measured with."""

    def forward(self, x):
        if (x > 0).all():
            raise RuntimeError("no such kernel")
        return x * 2


class Telling(nn.Module):
    def forward(self, x):
        return x * 2, float(x.detach().sum())


class First(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.inner = tightfit.opaque(inner)

    def forward(self, x):
        y = self.inner(self.a(x))
        return (y[0] if isinstance(y, tuple) else y).sum()


@needs(LEAVES)
@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (Overwriting, "'inner' writes over one of its inputs"),
        (Failing, ""),
        (Resizing, "'inner' returned other tensors"),
        (Telling, "'inner' returned .* in addition to its tensors"),
    ],
)
def test_what_cannot_be_one_op_runs_as_it_is(inner, message, capsys) -> None:
    torch.manual_seed(0)
    plain = First(inner())
    model = tightfit.fit(copy.deepcopy(plain), "1GiB", costs="unit")
    for _ in range(3):
        x = torch.randn(9, 8)
        assert all(map(torch.equal, trained(plain, x), trained(model, x)))
    assert re.search(message, capsys.readouterr().err)


class Boxed(collections.UserDict):
    pass


class Boxing(nn.Module):
    """Returns a type that is not registered with pytree."""

    def forward(self, x):
        return Boxed(doubled=x * 2)


class Unboxing(First):
    def forward(self, x):
        return self.inner(self.a(x))["doubled"].sum()


@needs(LEAVES)
def test_a_block_whose_output_no_tracer_can_look_into_is_planned_with_the_rest() -> None:
    torch.manual_seed(0)
    plain = Unboxing(Boxing())
    model = tightfit.fit(copy.deepcopy(plain), "1GiB", costs="unit")
    for _ in range(2):
        x = torch.randn(9, 8)
        assert all(map(torch.equal, trained(plain, x), trained(model, x)))
    assert not tightfit.report(model).outside


class Choosing(nn.Module):
    """Says how many rows it has chosen."""

    def forward(self, x):
        chosen = x[:, 0] > 0
        return torch.where(chosen[:, None], x * 2, x), int(chosen.sum())


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.inner = Choosing()

    def forward(self, x):
        y, rows = self.inner(nn.functional.dropout(self.body(x), 0.1))
        return y.square().sum(), rows


def test_where_a_block_tells_other_numbers_in_each_step_parts_are_planned() -> None:
    plain, model = Routed(), tightfit.fit(Routed(), "1GiB", costs="unit", cache=False)
    torch.manual_seed(1)
    batches = [torch.randn(9, 8) for _ in range(5)]
    for seed, x in enumerate(batches):
        results = []
        for each in (plain, model):
            each.zero_grad()
            torch.manual_seed(seed)
            loss, rows = each(x)
            loss.backward()
            drawn = torch.rand(1)
            results.append([loss, torch.tensor(rows), drawn, *(p.grad for p in each.parameters())])
        assert all(map(torch.equal, *results))
    attached(model).close_step()
    assert tightfit.report(model).parts


@needs(LEAVES)
def test_sums_in_low_precision_across_blocks_are_those_of_plain_pytorch(capsys) -> None:
    torch.manual_seed(0)
    block = tightfit.opaque(nn.Linear(8, 8))
    plain = nn.Sequential(block, block)
    model = tightfit.fit(copy.deepcopy(plain), "1GiB", costs="unit")
    x = torch.randn(4, 8)
    for keeps_casts in (True, False):
        results = []
        for each in (plain, model):
            each.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=keeps_casts):
                loss = each(x).float().sum()
            loss.backward()
            results.append([loss, *(p.grad for p in each.parameters())])
        assert all(map(torch.equal, *results))
    assert "is called several times" in capsys.readouterr().err


def test_opaque_takes_modules_and_needs_real_ones() -> None:
    with pytest.raises(BadInput, match=r"nn\.Module"):
        tightfit.opaque(torch.nn.functional.relu)  # type: ignore[arg-type]
    with torch.device("meta"):
        model = Tower()
    tightfit.opaque(model.blocks[0])
    tightfit.fit(model, "1GiB", costs="unit")
    with pytest.raises(CaptureError, match="only shapes"):
        tightfit.prepare(model, torch.randn(4, 32, device="meta"))


@needs(LEAVES)
def test_a_dry_step_of_a_model_that_exists_measures_its_opaque_modules() -> None:
    """Of shapes alone it cannot."""
    with torch.device("meta"):
        shapes = (tightfit.opaque(Tower()), None, (torch.empty(4, 32),), None)
    with pytest.raises(CaptureError, match="only shapes"):
        graph_of(shapes, costs="unit")
    graph = graph_of((opaque_tower(), None, (torch.randn(4, 32),), None), costs="unit")
    assert [op.target for op in graph.ops].count("tightfit.opaque_forward") == 4


class Normed(nn.Module):
    """Its backward reads statistics too: they are the module's own, not saved tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(32)
        self.layer = nn.Linear(32, 32)

    def forward(self, x):
        return self.layer(self.norm(x).tanh())


@needs(LEAVES)
def test_what_is_kept_is_as_measured_with_statistics_of_a_batch_norm() -> None:
    x = torch.randn(256, 32)
    graph = graph_of((opaque_tower(Normed), None, (x,), None), costs="unit")
    records = [value.size_bytes for value in graph.values if value.stays]
    assert len(records) == 4
    assert all(x.nbytes <= size <= x.nbytes + 1024 for size in records)
