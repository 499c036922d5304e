"""A fitted module and a plain copy of it: the same losses, gradients and numbers drawn."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

import tightfit
from tightfit.session.report import Report


def trained_and_compared(
    net: nn.Module, batches: Iterable[tuple[Any, ...]], budget: str = "10MiB"
) -> Report:
    """Train a module that returns its loss, fitted, and a plain copy; every bit must be the same.

    Returns
    -------
    Report
        Of the last step.
    """
    plain = copy.deepcopy(net)
    tightfit.fit(net, budget)
    for step, batch in enumerate(batches):
        drawn = []
        for each in (plain, net):
            each.zero_grad()
            torch.manual_seed(step)
            loss = each(*batch)
            loss.backward()
            drawn.append((loss.detach(), torch.rand(3)))
        assert all(map(torch.equal, *drawn))
        for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            if ours.grad is not None and theirs.grad is not None:
                assert torch.equal(ours.grad, theirs.grad.clone())
    return tightfit.report(net)
