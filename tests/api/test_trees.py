"""Trees as Python objects: a forward that calls itself, and one that writes into the nodes."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import tightfit


@dataclass(eq=False)
class Node:
    word: int
    children: tuple[Node, ...] = ()
    state: Tensor | None = None


TREES = (
    Node(0, (Node(1), Node(2))),
    Node(0, (Node(1), Node(0, (Node(3), Node(4))))),
    Node(0, (Node(2), Node(1))),
)


class Recursive(nn.Module):
    """Calls itself on every child."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.join = nn.Embedding(10, 16), nn.Linear(32, 16)

    def forward(self, node: Node) -> Tensor:
        if not node.children:
            return self.words(torch.tensor([node.word]))
        return torch.tanh(self.join(torch.cat([self(child) for child in node.children], 1)))


class Writing(Recursive):
    """Leaves in every node what it computed there."""

    def forward(self, node: Node) -> Tensor:
        node.state = super().forward(node)
        return node.state


def fitted(model: nn.Module) -> Any:
    return tightfit.fit(model, "1GiB", costs="unit", cache=False)


def gradients(model: nn.Module, tree: Node) -> list[Tensor]:
    model.zero_grad()
    loss = model(copy.deepcopy(tree)).square().sum()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def test_a_forward_over_a_tree_may_call_itself() -> None:
    plain, model = Recursive(), fitted(Recursive())
    for tree in (*TREES, *TREES):
        for mine, theirs in zip(gradients(model, tree), gradients(plain, tree), strict=True):
            assert torch.equal(mine, theirs)


def test_one_may_write_into_nodes() -> None:
    plain, model = Writing(), fitted(Writing())
    for tree in (*TREES, *TREES):
        given, again = copy.deepcopy(tree), copy.deepcopy(tree)
        for mine, theirs in zip(gradients(model, given), gradients(plain, again), strict=True):
            assert torch.equal(mine, theirs)


def test_a_state_left_in_a_node_has_its_history() -> None:
    results: list[Any] = []
    for model in (Writing(), fitted(Writing())):
        tree = copy.deepcopy(TREES[1])
        loss = model(tree).sum() + sum(child.state.square().sum() for child in tree.children)
        loss.backward()
        results.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


class Linked:
    """A node that knows the one above it."""

    def __init__(self, word: int, above: Linked | None = None) -> None:
        self.word, self.above, self.below = word, above, []
        if above is not None:
            above.below.append(self)


class Climbing(Recursive):
    """Looks from the nodes below at the one above them."""

    def forward(self, node: Linked) -> Tensor:
        own = self.words(torch.tensor([node.word]))
        own = own if node.above is None else own * (node.above.word + 1)
        return own + sum(torch.tanh(self(below)) for below in node.below)


def test_nodes_may_know_the_one_above() -> None:
    results: list[Any] = []
    for model in (Climbing(), fitted(Climbing())):
        top = Linked(3)
        Linked(1, top), Linked(2, top)
        model(top).square().sum().backward()
        results.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
