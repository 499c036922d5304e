"""Sparse matrices among the inputs: graph networks as they are published."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import tightfit
from tightfit.allocator.resident import element_bytes


class GraphNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        x = torch.relu(torch.sparse.mm(adjacency, self.first(x)))
        return torch.sparse.mm(adjacency, self.second(x))


def adjacency(layout: torch.layout) -> torch.Tensor:
    torch.manual_seed(0)
    places, weights = torch.randint(0, 100, (2, 400)), torch.rand(400)
    sparse = torch.sparse_coo_tensor(places, weights, (100, 100), check_invariants=True).coalesce()
    return sparse if layout == torch.sparse_coo else sparse.to_sparse_csr()


def gradients(net: nn.Module, matrix: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)
    net(torch.randn(100, 16), matrix).square().mean().backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_gradients_are_those_of_plain_pytorch(layout: torch.layout) -> None:
    matrix = adjacency(layout)
    plain = GraphNetwork()
    fitted = tightfit.fit(copy.deepcopy(plain), "64MiB", cache=False)
    expected = gradients(plain, matrix)
    assert len(expected) == 4
    assert all(map(torch.equal, gradients(fitted, matrix), expected))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_their_bytes_are_those_of_places_and_elements() -> None:
    coo, csr = adjacency(torch.sparse_coo), adjacency(torch.sparse_csr)
    elements = coo.values().numel()
    assert element_bytes([coo, "no tensor"]) == elements * (2 * 8 + 4)
    assert element_bytes([csr]) == elements * (8 + 4) + 101 * 8
