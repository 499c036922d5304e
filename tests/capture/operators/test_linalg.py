"""Factorizations of matrices: one graph, the same bits, and the errors of plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import tightfit
from support.plainly import trained_and_compared

WAYS: dict[str, Callable[..., torch.Tensor]] = {
    "inverse": lambda a, x: torch.linalg.inv(a) @ x,
    "old inverse": lambda a, x: torch.inverse(a) @ x,
    "solve": torch.linalg.solve,
    "cholesky": lambda a, x: torch.linalg.cholesky(a @ a.T),
    "eigenvalues": lambda a, x: torch.linalg.eigvals(a).abs(),
    "matrix power": lambda a, x: torch.linalg.matrix_power(a, -2),
    "log determinant": lambda a, x: torch.slogdet(a)[1],
    "normal distribution": lambda a, x: torch.distributions.MultivariateNormal(
        x.mean(0), a @ a.T
    ).log_prob(x),
}


class Factorized(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = WAYS[way]
        self.first = nn.Linear(8, 8)

    def forward(self, x, shift):
        matrix = self.first(x) * shift + 9 * shift * torch.eye(8)
        return self.way(matrix, x).square().mean()


@pytest.mark.parametrize("way", WAYS)
def test_a_factorization_has_the_bits_of_plain_pytorch(way: str) -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(8, 8), torch.ones(())) for _ in range(2)]
    assert trained_and_compared(Factorized(way), batches).parts == ()


def test_a_singular_matrix_is_an_error_in_the_forward() -> None:
    net = Factorized("inverse")
    fitted = tightfit.fit(net, "10MiB")
    x = torch.randn(8, 8)
    fitted(x, torch.ones(())).backward()
    with pytest.raises(torch.linalg.LinAlgError, match=r"linalg\.inv"):
        fitted(x, torch.zeros(()))
    assert torch.isfinite(fitted(x, torch.ones(())))


def test_operators_that_take_no_drawn_numbers_are_priced_by_others() -> None:
    """Lengths of segments must sum up to the number of rows."""

    class Segments(Factorized):
        def forward(self, x, lengths):
            return torch.segment_reduce(self.first(x), "sum", lengths=lengths).square().mean()

    net = Segments("inverse")
    plain = copy.deepcopy(net)
    fitted = tightfit.fit(net, "10MiB", cache=False)
    x, lengths = torch.randn(8, 8), torch.tensor([2, 3, 3])
    assert torch.equal(fitted(x, lengths), plain(x, lengths))
