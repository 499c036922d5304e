"""What is written in place keeps its layout, whatever layout a new result would have."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import tightfit

MASK = torch.rand(32, 24, generator=torch.Generator().manual_seed(0)) > 0.5
ROWS = torch.tensor([1, 5, 7])
FIRST = torch.zeros(1, 24, dtype=torch.long)

WRITES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "masked_fill": lambda x, w: x.masked_fill_(MASK, 0.0),
    "masked_scatter": lambda x, w: x.masked_scatter_(MASK, w),
    "tril": lambda x, w: x.tril_(),
    "cumsum": lambda x, w: x.cumsum_(0),
    "index_add": lambda x, w: x.index_add_(0, ROWS, w[:3, :24]),
    "index_copy": lambda x, w: x.index_copy_(0, ROWS, w[:3, :24]),
    "index_fill": lambda x, w: x.index_fill_(0, ROWS, 2.0),
    "index_put": lambda x, w: x.index_put_((ROWS,), w[:3, :24]),
    "scatter": lambda x, w: x.scatter_(0, FIRST, 1.0),
    "scatter_add": lambda x, w: x.scatter_add_(0, FIRST, w[:1, :24]),
    "clamp": lambda x, w: x.clamp_(min=0.1),
    "lerp": lambda x, w: x.lerp_(w[:, :24], 0.3),
}


class Writes(nn.Module):
    """Writes into a transposed result, which others read as it is and turned back."""

    def __init__(self, write: str, is_view: bool) -> None:
        super().__init__()
        self.write, self.is_view = write, is_view
        self.first, self.second = (nn.Parameter(torch.randn(32, 32) / 5) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        made = x @ self.first
        turned = (made + 0).t() if self.is_view else made.t() * 2
        written = WRITES[self.write](turned, self.second)
        through = written.tanh() @ torch.ones(24, 17)
        return through.square().sum() + (written.t() @ self.second).sin().sum(), made, written


@pytest.mark.parametrize("is_view", [True, False], ids=["view", "result"])
@pytest.mark.parametrize("write", WRITES)
def test_layouts_and_bits_are_those_of_plain_pytorch(write: str, is_view: bool) -> None:
    torch.manual_seed(0)
    plain = Writes(write, is_view)
    fitted = tightfit.fit(copy.deepcopy(plain), "1GiB", costs="unit", cache=False)
    x = torch.randn(24, 32)
    (loss, _, written), (own_loss, _, own_written) = plain(x), fitted(x)
    loss.backward()
    own_loss.backward()
    assert own_written.stride() == written.stride()
    for a, b in zip(plain.parameters(), fitted.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    assert torch.equal(own_loss, loss) and torch.equal(own_written, written)


def test_a_backward_of_pytorch_that_writes_in_place_keeps_its_layout() -> None:
    """That of distances masks the transposed gradient that comes of a Cholesky factor."""

    class Kernel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            z = self.features(x)
            covariance = torch.exp(-torch.cdist(z, z).square()) + torch.eye(len(x)) / 2
            return torch.linalg.cholesky(covariance).diagonal().log().sum()

    torch.manual_seed(0)
    plain = Kernel()
    fitted = tightfit.fit(copy.deepcopy(plain), "1GiB", costs="unit", cache=False)
    x = torch.randn(48, 8)
    for each in (plain, fitted):
        each(x).backward()
    for a, b in zip(plain.parameters(), fitted.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_a_product_that_is_written_into_a_transposed_tensor_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its kernel adds up in another order for a new result."""
    monkeypatch.setitem(WRITES, "addmm", lambda x, w: x.addmm_(w, x.clone()))
    torch.manual_seed(0)
    plain = Writes("addmm", True)
    fitted = tightfit.fit(copy.deepcopy(plain), "1GiB", costs="unit", cache=False)
    x = torch.randn(24, 32)
    assert all(map(torch.equal, plain(x), fitted(x)))
    assert "a transposed tensor" in capsys.readouterr().err
