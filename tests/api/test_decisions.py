"""A forward that reads values in Python: planned per answer where inputs alone decide."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import tightfit
from tightfit.errors import CaptureError
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


class Buffer(Base):
    def forward(self, x, mask):
        return self.a(x).sum() if self.limit > mask.sum() else self.b(x).relu().sum()


class Constant(Base):
    """Nothing the caller could change decides: a draw below 0 never happens."""

    def forward(self, x, mask):
        skipped = torch.rand([]) < 0.0
        return self.b(x).sum() if skipped else self.a(nn.functional.dropout(x)).sum()


@pytest.mark.parametrize("kind, plans", [(Padding, 2), (Length, 3), (Written, 2), (Buffer, 2)])
def test_one_plan_for_each_answer_and_the_same_bits(kind: type[Base], plans: int):
    torch.manual_seed(0)
    plain = kind()
    fitted = tightfit.fit(copy.deepcopy(plain), "1GiB", costs="unit", cache=False)
    for length in (4, 3, 2, 4, 3, 2):
        x, mask = torch.randn(2, 4, 8), torch.ones(2, 4, dtype=torch.long)
        mask[:, length:] = 0
        train_and_compare(plain, fitted, x, mask)
    assert len(attached(fitted).all_shapes()) == plans


def train_and_compare(plain: nn.Module, fitted: nn.Module, x, mask) -> None:
    results = []
    for model in (plain, fitted):
        torch.manual_seed(1)
        model.zero_grad()
        own = mask.clone()
        loss = model(x, own)
        loss.backward()
        results.append([loss, own, *(p.grad for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def test_what_no_input_changes_is_not_checked_again():
    model = tightfit.fit(Constant(), "1GiB", costs="unit", cache=False)
    train_and_compare(copy.deepcopy(tightfit.unfit(copy.deepcopy(model))), model, *inputs())
    assert attached(model).all_shapes()[-1].captured.joint.decisions.values == ()


def test_a_changed_buffer_changes_the_answer():
    torch.manual_seed(0)
    plain = Buffer()
    fitted = tightfit.fit(copy.deepcopy(plain), "1GiB", costs="unit", cache=False)
    for limit in (7, 100, 7):
        plain.limit.fill_(limit), fitted.limit.fill_(limit)
        train_and_compare(plain, fitted, *inputs())


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, 4, 8), torch.ones(2, 4, dtype=torch.long)


class OnActivations(Base):
    def forward(self, x, mask):
        return self.b(x).sum() if self.a(x).sum() > 0 else self.a(x).sum()


class OnDraws(Base):
    def forward(self, x, mask):
        return self.b(x).sum() if torch.rand([]) < 0.5 else self.a(x).sum()


@pytest.mark.parametrize("kind", [OnActivations, OnDraws])
def test_what_cannot_be_known_beforehand_is_refused_by_name(kind: type[Base]):
    model = tightfit.fit(kind(), "1GiB", costs="unit", cache=False)
    with pytest.raises(CaptureError, match="needs the values of a tensor"):
        model(*inputs())
