"""Where the trace of a step ends that no plan is made of."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import tightfit
import tightfit.capture.trace.trace as tracing
from tightfit.capture.capture import capture
from tightfit.capture.traced_call import TracedCall
from tightfit.errors import CaptureError


class Counting(nn.Linear):
    """Counts its calls in an attribute, in a list within one, in its class, or not at all."""

    of_all = 0

    def __init__(self, how: str) -> None:
        super().__init__(3, 3)
        self.how, self.calls, self.kept = how, 0, {"calls": [0]}

    def forward(self, x):
        self.calls += self.how == "attribute"
        self.kept["calls"][0] += self.how == "list"
        Counting.of_all += self.how == "class"
        return super().forward(x).sum()


@pytest.fixture
def ends(monkeypatch) -> list[str]:
    """Note the traces that reach the end of the backward."""
    reached: list[str] = []
    read = tracing._read

    def noted(*arguments):
        reached.append("backward")
        return read(*arguments)

    monkeypatch.setattr(tracing, "_read", noted)
    return reached


def captured(model: nn.Module):
    return capture(TracedCall(model.forward, {"model": model}, (torch.ones(2, 3),), {}))


@pytest.mark.parametrize("how", ["attribute", "list", "class"])
def test_forward_that_changes_state_has_no_backward_traced(how, ends) -> None:
    model = Counting(how)
    with pytest.raises(CaptureError, match="changes Python state: ") as caught:
        captured(model)
    assert caught.value.cause == "state"
    assert (ends, model.calls, model.kept["calls"], Counting.of_all) == ([], 0, [0], 0)


def test_state_that_the_trace_alone_changes_ends_no_capture(ends, monkeypatch) -> None:
    """What is as before once the tracer is gone is traced to its end, as ever."""
    monkeypatch.setattr(tracing.PythonState, "has_changed", property(lambda self: True))
    graph = captured(Counting("not")).graph
    assert ends == ["backward"]
    monkeypatch.undo()
    assert graph == captured(Counting("not")).graph


class AsksWhatItHas(nn.Module):
    """Treats parameters otherwise than buffers, whatever they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("fixed", torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in (self.layer.weight, self.fixed):
            x = x @ weight if isinstance(weight, nn.Parameter) else x * weight.sum()
        return x.sum()


def test_what_stands_for_a_parameter_says_that_it_is_one() -> None:
    torch.manual_seed(0)
    plain = AsksWhatItHas()
    fitted = tightfit.fit(copy.deepcopy(plain), "1GiB", costs="unit", cache=False)
    x = torch.randn(3, 4)
    assert torch.equal(plain(x), fitted(x))
