"""Tensors that Python frees between graph breaks are freed at the next, where Dynamo follows."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

import tightfit


class _Reassigning(nn.Module):
    """Notes which of its tensors still exist, at breaks of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.made: dict[str, weakref.ref[Tensor]] = {}
        self.alive: list[frozenset[str]] = []

    @torch._dynamo.disable
    def note(self, name: str, made: Tensor) -> None:
        self.made[name] = weakref.ref(made)
        self.alive.append(frozenset(n for n, found in self.made.items() if found() is not None))

    @torch._dynamo.disable
    def refuse(self) -> None:
        raise ValueError("refused")

    def forward(self, x: Tensor, refuses: bool = False) -> Tensor:
        with torch.no_grad():
            h = x * 2
            self.note("first", h)
            h = h + 1
            self.note("second", h)
            h = h.sin()
            self.note("third", h)
            h = h.cos()
            self.note("fourth", h)
        if refuses:
            self.refuse()
        y = self.layer(h)
        if y.sum().item() > 1e9:
            y = y + 1
        h = torch.zeros(())
        self.note("last", h)
        return (y + h).square().mean()


@contextmanager
def _fitted(model: nn.Module) -> Iterator[nn.Module]:
    yield tightfit.fit(model, "1GiB", cache=False)
    tightfit.unfit(model)


def test_tensors_die_where_python_frees_them() -> None:
    model, x = _Reassigning(), torch.randn(2, 4)
    plain = model(x)
    expected = list(model.alive)
    with _fitted(model):
        for _ in range(3):
            model.made.clear(), model.alive.clear()
            loss = model(x)
            loss.backward()
            assert torch.equal(loss, plain)
            # what lived at a break is an argument until the next
            before = [frozenset[str](), *expected]
            for now, then, earlier in zip(model.alive, expected, before, strict=False):
                assert now <= then | earlier


def test_errors_after_a_break_are_raised_to_the_caller() -> None:
    model, x = _Reassigning(), torch.randn(2, 4)
    with _fitted(model):
        for _ in range(2):
            with pytest.raises(ValueError, match="refused"):
                model(x, refuses=True)
            model(x).backward()
