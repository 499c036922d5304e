"""A forward that reads values in Python: planned for each answer, checked in every step."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import tightfit
from api.test_bitwise import assert_equal
from tightfit.execution.attach import attached


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)
        self.register_buffer("limit", torch.tensor(7))


class Padding(Base):
    """As transformers do: a mask that masks nothing is dropped."""

    def forward(self, x, mask):
        return self.a(x).sum() if mask.all() else (self.b(x) * mask[..., None]).sum()


class Length(Base):
    def forward(self, x, mask):
        longest = int(mask.sum(-1).max())
        return self.a(x[:, :longest]).square().sum() + self.b(x).sum()


class Written(Base):
    """The value comes out of a view of what was written to in place, an input too."""

    def forward(self, x, mask):
        mask.mul_(2)
        positions = torch.arange(4).view(2, 2)
        positions[0].add_(int(mask[0, -1]))
        x = self.a(x) if positions.sum() > 6 else self.b(x).relu()
        return x.sum() * mask.sum()


class Lists(Base):
    """Lengths as a list, as those of images of several sizes; tensors made of lists of tensors."""

    def forward(self, x, mask):
        pieces = [self.a(row[:n]).sum() for row, n in zip(x, mask.sum(-1).tolist(), strict=True)]
        scales = torch.tensor([self.b(x).mean().detach(), mask.float().mean()])
        shifts = torch.tensor([[mask[0, -1], 2], [3, mask[1, -1]]]).float().mean(0)
        return ((torch.stack(pieces) + shifts) * scales).sum() + self.b(x).square().mean()


class Buffer(Base):
    def forward(self, x, mask):
        return self.a(x).sum() if self.limit > mask.sum() else self.b(x).relu().sum()


class Constant(Base):
    """Nothing the caller could change decides: a draw below 0 never happens."""

    def forward(self, x, mask):
        skipped = torch.rand([]) < 0.0
        return self.b(x).sum() if skipped else self.a(nn.functional.dropout(x)).sum()


@pytest.mark.parametrize("kind", [Padding, Length, Written, Lists, Buffer, Constant])
def test_answers_that_are_known_take_no_new_plan_and_the_bits_are_the_same(kind: type[Base]):
    torch.manual_seed(0)
    plain = kind()
    fitted = tightfit.fit(copy.deepcopy(plain), "1GiB", costs="unit", cache=False)
    known = []
    for length in (4, 3, 2) * 3:
        x, mask = torch.randn(2, 4, 8), torch.ones(2, 4, dtype=torch.long)
        mask[:, length:] = 0
        train_and_compare(plain, fitted, x, mask)
        known.append(plans_of(fitted))
    assert known[0] > 0 and known[5] == known[-1]


def plans_of(fitted: nn.Module) -> int:
    """Return how many graphs, or parts of a model of several graphs, are planned."""
    session = attached(fitted)
    parts = len(session.route.steps.known) if session.is_in_parts else 0
    return parts + len(session.specialisations)


def train_and_compare(plain: nn.Module, fitted: nn.Module, x, mask, seed: int = 1) -> None:
    results = []
    for model in (plain, fitted):
        torch.manual_seed(seed)
        model.zero_grad()
        own = mask.clone()
        loss = model(x, own)
        loss.backward()
        results.append([loss, own, *(p.grad for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def test_a_changed_buffer_changes_the_answer():
    torch.manual_seed(0)
    plain = Buffer()
    fitted = tightfit.fit(copy.deepcopy(plain), "1GiB", costs="unit", cache=False)
    for limit in (7, 100, 7):
        plain.limit.fill_(limit), fitted.limit.fill_(limit)
        train_and_compare(plain, fitted, *inputs())


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, 4, 8), torch.ones(2, 4, dtype=torch.long)


class Computed(nn.Module):
    """What it computes decides what it runs, and how much of it; it draws numbers before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x):
        for layer in self.layers:
            x = nn.functional.dropout(layer(x).tanh(), 0.1)
        x = self.norm(x)
        if x[0].sum() > 0:
            x = self.layers[0](x).relu()
        chosen = x[x[:, 0].argsort() < 400]
        return (x * chosen.mean(0)).square().sum()


class Selecting(Computed):
    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        kept = x.detach()[:, 0].argsort() < 400 + 50 * (x[0, 0] > x[1, 0]).long()
        return self.norm(x[kept]).square().sum() + torch.unique(kept).sum()


@pytest.mark.parametrize("kind", [Computed, Selecting])
def test_computed_values_decide_between_graphs_inside_a_budget(kind: type[nn.Module]):
    """Nothing leaves the budget: what is outside of plans is measured in the first steps."""
    torch.manual_seed(0)
    plain, model = kind(), kind()
    model.load_state_dict(plain.state_dict())
    options = {"costs": "unit", "cache": False, "limits": (0.5, 0.01)}
    batches = [torch.randn(512, 32) for _ in range(6)]
    expected = [step_of(plain, x, seed) for seed, x in enumerate(batches)]
    ample = copy.deepcopy(model)
    tightfit.fit(ample, "1GiB", **options)
    for seed, x in enumerate(batches[:3]):
        step_of(ample, x, seed)
    attached(ample).close_step()
    budget = int(0.9 * tightfit.report(ample).measured_peak_bytes)
    tightfit.fit(model, budget, **options)
    for seed, x in enumerate(batches):
        assert_equal(step_of(model, x, seed), expected[seed])
        step = attached(model).close_step()
        assert step is None or step.peak_bytes <= budget


def assert_same_step(plain: nn.Module, model: nn.Module, x: torch.Tensor, seed: int) -> None:
    assert_equal(step_of(plain, x, seed), step_of(model, x, seed))


def step_of(model: nn.Module, x: torch.Tensor, seed: int) -> list[torch.Tensor | None]:
    """Run one step; return all that it gave and changed, the next random number included."""
    torch.manual_seed(seed)
    loss = model(x)
    loss.backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    return [loss.detach(), *gradients, *(b.clone() for b in model.buffers()), torch.rand(1)]


class Routed(nn.Module):
    """Drawn noise decides which expert takes which row: other sizes in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 2)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)) for _ in range(2)
        )

    def forward(self, x):
        noisy = self.gate(x) + torch.randn(x.size(0), 2)
        weight, chosen = noisy.softmax(1).max(1)
        rows = chosen.argsort()
        sizes = (chosen.unsqueeze(1) == torch.arange(2)).sum(0).tolist()
        parts = zip(self.experts, x[rows].split(sizes), strict=True)
        out = torch.cat([expert(part) for expert, part in parts])
        return (out.squeeze(1) * weight[rows]).square().mean()


def test_an_outermost_forward_that_decides_in_every_step_settles(capsys):
    torch.manual_seed(0)
    plain = Routed()
    model = tightfit.fit(copy.deepcopy(plain), "1GiB", costs="unit", cache=False)
    for seed in range(10):
        if seed == 8:
            capsys.readouterr()
        assert_same_step(plain, model, torch.randn(64, 16), seed)
    assert "new plan" not in capsys.readouterr().err


class Recurrent(nn.Module):
    """Packs, runs and unpacks, as speech models do."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(8, 8, batch_first=True, bidirectional=True)

    def forward(self, x, lengths):
        rows = nn.utils.rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.cells(rows)[0], batch_first=True)[0]


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.recurrent, self.after = nn.Linear(8, 8), Recurrent(), nn.Linear(16, 4)

    def forward(self, x, mask):
        return self.after(self.recurrent(self.before(x).relu(), mask.sum(1))).square().mean()


def test_a_module_for_which_inputs_decide_in_every_step_settles(capsys):
    torch.manual_seed(0)
    plain = Speech()
    model = tightfit.fit(copy.deepcopy(plain), "1GiB", costs="unit", cache=False)
    for step in range(16):
        if step == 12:
            capsys.readouterr()
        mask = torch.arange(20)[None] < torch.tensor([20, 19 - step, 3 + step])[:, None]
        train_and_compare(plain, model, torch.randn(3, 20, 8), mask.long())
    assert "new plan" not in capsys.readouterr().err


class OnDraws(Base):
    def forward(self, x, mask):
        return self.b(x).sum() if torch.rand([]) < 0.5 else self.a(x).sum()


def test_random_numbers_decide_the_branch():
    torch.manual_seed(0)
    plain = OnDraws()
    fitted = tightfit.fit(copy.deepcopy(plain), "1GiB", costs="unit", cache=False)
    for seed in range(6):
        train_and_compare(plain, fitted, *inputs(), seed=seed)


class Large(Base):
    """Most of a model."""

    def forward(self, x):
        return self.b(x) if self.a(x).sum() > 0 else self.a(x)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return self.a(x) if self.a(x).sum() > 0 else self.a(x).relu()


@pytest.mark.parametrize("inner", [Large, Small])
def test_an_inner_module_decides_by_what_it_computes(inner):
    class Outer(Base):
        def __init__(self) -> None:
            super().__init__()
            self.a = inner()
            self.c = nn.Linear(8, 8, bias=False)

        def forward(self, x, mask):
            return (self.b(self.a(x)) + self.c(x)).square().sum()

    torch.manual_seed(0)
    plain = Outer()
    fitted = tightfit.fit(copy.deepcopy(plain), "1GiB", costs="unit", cache=False)
    for _ in range(4):
        train_and_compare(plain, fitted, *inputs())


class Attached(Base):
    """Uses a plain tensor, writes into it, and replaces it at times."""

    def __init__(self) -> None:
        super().__init__()
        self.sum = torch.zeros(8)

    def forward(self, x, mask):
        self.sum.add_(x.detach().sum((0, 1)))
        return (self.a(x) * self.sum).sum() + self.b(x).sum()


def test_plain_tensors_are_read_and_written_as_in_eager():
    torch.manual_seed(0)
    plain = Attached()
    fitted = tightfit.fit(copy.deepcopy(plain), "1GiB", costs="unit", cache=False)
    for step in range(5):
        if step == 3:
            plain.sum, fitted.sum = torch.ones(8), torch.ones(8)
        train_and_compare(plain, fitted, *inputs())
        assert torch.equal(plain.sum, fitted.sum)
