"""Bytes that a fitted callable holds around its steps."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

from tightfit.session.memory.account import Account


def test_stand_ins_of_a_trace_are_counted_as_what_they_stand_for() -> None:
    layer = nn.Linear(64, 64)
    account = Account({"": layer}, None)
    account.set_limit(1 << 20)
    real, before = layer.weight, account.before_bytes()
    fake = FakeTensorMode(allow_non_fake_inputs=True).from_tensor(real.detach())
    with FunctionalTensorMode():
        layer._parameters["weight"] = FunctionalTensor.to_functional(fake)  # as in a trace
    account.count_again()  # as before a request is refused
    assert account.before_bytes() == before >= real.nbytes
    account.set_limit(None)


def test_members_are_held_too_while_others_are_in_their_place() -> None:
    layer = nn.Linear(64, 64)
    account = Account({"": layer}, None)
    account.set_limit(1 << 20)
    own_bytes = account.before_bytes()
    layer.forward = lambda: account.held_at_call(()).others_bytes
    assert layer() == 0
    instead = {name: x.detach() / 2 for name, x in layer.named_parameters()}
    assert torch.func.functional_call(layer, instead, ()) == own_bytes > 0
    account.set_limit(None)
