"""What a forward runs while it is traced is heard; what PyTorch does to trace it need not be."""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch
from torch import nn

from support.features import Sine, scale
from tightfit.capture.capture import capture
from tightfit.capture.reads.executed import Listener
from tightfit.capture.trace.garbage import fewer_collections
from tightfit.capture.trace.trace import trace
from tightfit.capture.traced_call import TracedCall


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = Sine.apply(scale(self.linear(x), 2.0))
        y.register_hook(self.doubled)
        return y.sum()

    def doubled(self, gradient):
        return 2 * gradient


def call_of(model: nn.Module) -> TracedCall:
    return TracedCall(model, {"model": model}, (torch.randn(2, 4),), {})


def test_code_that_operators_of_others_and_the_backward_run_is_heard():
    listener = Listener()
    with listener, listener.without_operators():
        trace(call_of(Hooked()))
    names = {code.co_name for code, _ in listener.executed().codes}
    assert {"forward", "doubled", "backward"} <= names
    assert "_" in names  # the fake kernel of `scale`


def test_a_profiler_of_the_user_is_told_of_everything_and_goes_on():
    seen: set[Any] = set()

    def profiler(frame: Any, event: str, argument: Any) -> None:
        seen.add(frame.f_code.co_name)

    sys.setprofile(profiler)
    try:
        capture(call_of(Hooked()))
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)
    assert {"doubled", "dispatch"} <= seen


def test_garbage_is_collected_as_before_after_traces_of_two_threads():
    before = gc.get_threshold()
    first, second = fewer_collections(), fewer_collections()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold() > before
    second.__exit__(None, None, None)
    assert gc.get_threshold() == before


def test_garbage_is_collected_as_before_after_a_trace():
    frozen, thresholds = gc.get_freeze_count(), gc.get_threshold()
    gc.unfreeze()
    try:
        with fewer_collections():
            assert gc.get_freeze_count() > 0
            assert gc.get_threshold() > thresholds
        assert gc.get_freeze_count() == 0
        assert gc.get_threshold() == thresholds
        gc.set_threshold(0)
        with fewer_collections():  # never stays never
            assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*thresholds)
        gc.freeze()
    with fewer_collections():  # what the program has frozen stays so
        pass
    assert gc.get_freeze_count() > 0
    if not frozen:
        gc.unfreeze()
