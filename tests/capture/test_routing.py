"""Routers of experts decide once: a recomputation takes what the first run chose."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tightfit
from tightfit.capture.capture import capture
from tightfit.capture.traced_call import TracedCall


def mixtral(scores: Tensor) -> tuple[Tensor, Tensor]:
    weights, experts = torch.topk(F.softmax(scores, -1), 2)
    return weights / weights.sum(-1, keepdim=True), experts


def qwen(scores: Tensor) -> tuple[Tensor, Tensor]:
    return torch.topk(F.softmax(scores, -1), 3)


def deepseek(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The best experts of the two best groups, by sigmoid."""
    values = torch.sigmoid(scores)
    of_groups = values.unflatten(-1, (4, -1))
    best = torch.topk(of_groups.topk(2)[0].sum(-1), 2)[1]
    allowed = torch.zeros_like(of_groups[..., 0]).scatter(-1, best, 1.0).unsqueeze(-1)
    weights, experts = torch.topk((of_groups * allowed).flatten(-2), 2)
    return weights / weights.sum(-1, keepdim=True), experts


def switch(scores: Tensor) -> tuple[Tensor, Tensor]:
    values = F.softmax(scores, -1)
    best = values.argmax(-1, keepdim=True)
    return values.gather(-1, best), best


class Experts(nn.Module):
    """Blocks of experts behind a router."""

    def __init__(self, route) -> None:
        super().__init__()
        self.route = route
        self.routers = nn.ModuleList(nn.Linear(16, 8) for _ in range(3))
        self.wide = nn.ParameterList(torch.randn(8, 16, 64) / 8 for _ in range(3))
        self.back = nn.ParameterList(torch.randn(8, 64, 16) / 8 for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for router, wide, back in zip(self.routers, self.wide, self.back, strict=True):
            weights, experts = self.route(router(x))
            share = torch.zeros(*x.shape[:-1], 8).scatter(-1, experts, weights)
            made = torch.einsum("tw,ewh->teh", x, wide)
            x = x + torch.einsum("teh,ehw,te->tw", F.silu(made), back, share)
        return x.square().mean()


@pytest.mark.parametrize("route", [mixtral, qwen, deepseek, switch])
def test_what_a_router_has_chosen_is_kept_and_results_are_bitwise(route) -> None:
    torch.manual_seed(0)
    model, x = Experts(route), torch.randn(200, 16)
    graph = capture(TracedCall(model, {"model": model}, (x,), {})).graph
    deciding = [op for op in graph.ops if op.target.startswith(("aten.topk", "aten.argmax"))]
    assert len(deciding) >= 3
    assert all(op.pinned is not None and "decides" in op.pinned for op in deciding)
    few = {"steps": 2, "rounds": 0, "costs": "unit", "limits": (0.5, 0.1)}
    proof = tightfit.prove((model, None, (x,), None), budget_ratio=0.6, **few)
    assert proof.bitwise and proof.holds
    assert proof.overhead > 0
