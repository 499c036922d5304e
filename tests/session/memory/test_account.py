"""What an account counts, and how often."""

from __future__ import annotations

import torch
from torch import nn

from tightfit.session.memory.account import Account


def test_state_that_becomes_the_weight_counts_as_the_weight() -> None:
    """As where an optimizer saves weights, moves them, and sets `.data` to what it has saved."""
    net = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    account = Account({"": net}, optimizer)
    net(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    momentum_bytes = net.weight.nbytes
    assert account.existing_state_bytes() == momentum_bytes
    state = optimizer.state[net.weight]
    state["saved"] = net.weight.data.clone()
    assert account.existing_state_bytes() == 2 * momentum_bytes
    net.weight.data = state["saved"]
    assert account.existing_state_bytes() == momentum_bytes
