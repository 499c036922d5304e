"""Steps are captured once for all calls that run the same, and forgotten when long unused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from support.handed import LayerCalls, handed
from tightfit.capture.handed import GraphArguments, HandedGraphs
from tightfit.session.callee import Callee
from tightfit.session.options import make_options
from tightfit.session.whole import captures
from tightfit.session.whole.captures import Captures

OPTIONS = make_options("1GiB", costs="unit", cache=False)


def layer_calls() -> LayerCalls:
    return LayerCalls(nn.Linear(3, 2), OPTIONS)


def test_a_step_is_found_for_calls_that_run_the_same_and_for_no_others() -> None:
    calls = layer_calls()
    assert calls.found(4) is None
    spec = calls.capture(4)
    assert calls.found(4) is spec and calls.found(5) is None
    assert calls.captures.serves(spec, calls.given(4))
    inputs = calls.captures.inputs(spec, calls.given(4))
    assert {*map(id, (calls.layer.weight, calls.layer.bias))} <= {*map(id, inputs)}
    before = calls.given(4)
    calls.layer.weight = nn.Parameter(torch.ones(2, 3))
    assert not calls.captures.serves(spec, before)
    assert calls.captures.serves(spec, calls.given(4))


def test_the_step_unused_for_longest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "_MOST_KEPT", 2)
    calls = layer_calls()
    first, second = calls.capture(4), calls.capture(5)
    first.use(calls.now + 1)
    calls.now += 1
    third = calls.capture(6)
    assert [calls.found(rows) for rows in (4, 5, 6)] == [first, None, third]
    assert second.is_further and len(calls.captures) == 2


def test_what_backwards_have_shown_outlives_the_steps() -> None:
    calls = layer_calls()
    spec = calls.capture(4)
    calls.captures.note_repeated(spec.key)
    calls.captures.forget_all()
    assert len(calls.captures) == 0 and calls.found(4) is None
    assert calls.captures.is_repeated(spec.key)


def test_a_step_that_writes_a_buffer_depends_on_which_members_share_memory() -> None:
    def counted(x: torch.Tensor, scale: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor]:
        seen.add_(1)
        return ((x * scale).sum(),)

    graph, module = handed(counted), nn.Module()
    module.scale = nn.Parameter(torch.ones(3))
    module.register_buffer("seen", torch.zeros(3))
    graphs = HandedGraphs({"model": module})
    known = Captures(Callee(graphs, {"model": module}, "module"))

    def given() -> GraphArguments:
        return graphs.arguments(graph, [torch.ones(3), module.scale, module.seen])

    key = known.signature(given())
    spec = known.capture(key, known.traced_call(key, given()), OPTIONS, 1)
    module.seen = torch.zeros(3)  # other memory, shared with none as before
    assert known.find(known.signature(given()), given()) is spec
    module.seen = module.scale.data
    assert known.find(known.signature(given()), given()) is None
