"""What `torch_private/dynamo.py` takes of Dynamo is there and does what is said of it."""

from __future__ import annotations

import gc
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from support.releases import needs
from tightfit.allocator import meter_for
from tightfit.torch_private import dynamo as private
from tightfit.torch_private.frames.ends import break_reason
from tightfit.torch_private.frames.examples import example_of
from tightfit.torch_private.frames.following import follows_derivatives
from tightfit.torch_private.frames.leaves import HAS_LEAVES
from tightfit.torch_private.frames.values import following_values, follows_values
from tightfit.torch_private.releases import DERIVATIVES, LEAVES, RELEASE, VALUES

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_the_table_of_releases_says_what_is_here() -> None:
    assert LEAVES.is_available == HAS_LEAVES
    assert DERIVATIVES.is_available == follows_derivatives()
    assert VALUES.is_available == follows_values()


class Watched(private.Follower):
    """Compiles a function; keeps its graphs, and what was skipped."""

    def __init__(
        self, function: Callable[..., Any], leaves: Any = None, may_be_one_op: Any = None
    ) -> None:
        self.graphs: list[fx.GraphModule] = []
        self.ends: list[private.End] = []
        self.places: list[Any] = []
        self.given: list[private.Given | None] = []
        self._may_be_one_op = may_be_one_op
        self.answers: list[str] = []

        def backend(module: fx.GraphModule, _: Any) -> Callable[..., Any]:
            self.graphs.append(module)
            return module.forward

        self._leaves = leaves or {}
        self.run = private.compiled(function, backend, self)

    def leaves(self) -> Any:
        return self._leaves

    def one_op_at(self, places: Any) -> Any:
        self.places.append(places)
        return self._may_be_one_op

    def try_as_one_op(self, forward: Any, given: private.Given | None) -> None:
        self.given.append(given)
        self._may_be_one_op = None

    def ended(self, end: private.End) -> None:
        self.ends.append(end)

    def runs_as_compiled(self, place: str) -> None:
        self.answers.append(f"as compiled: {place}")

    def skipped(self, code: types.CodeType, module: Any, reason: str, error: Any) -> None:
        self.answers.append(f"{code.co_name}: {reason}")


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) * self.calls


def test_a_number_becomes_an_input_and_a_size_does_not() -> None:
    model = Counter()
    watched = Watched(model.forward)
    for size in (2, 2, 2, 3, 5):
        watched.run(torch.randn(size, 4))
    assert len(watched.graphs) == 4  # static, with the number, and one for each further size
    examples = [
        [example_of(n) for n in graph.graph.nodes if n.op == "placeholder"]
        for graph in watched.graphs
    ]
    numbers = [sum(isinstance(x, torch.SymInt) for x in found) for found in examples]
    assert numbers == [0, 1, 1, 1]
    sizes = [x.shape for found in examples for x in found if isinstance(x, Tensor)]
    assert all(type(size) is int for shape in sizes for size in shape)


def test_what_this_callable_learns_is_not_learned_for_others() -> None:
    model = Counter()
    before = dict(torch._dynamo.pgo.get_code_state())
    watched = Watched(model.forward)
    for _ in range(3):
        watched.run(torch.randn(2, 4))
    assert dict(torch._dynamo.pgo.get_code_state()) == before


def test_containers_of_pytorchs_own_files_are_compiled() -> None:
    watched = Watched(nn.Sequential(nn.Linear(4, 4), nn.Tanh()).forward)
    watched.run(torch.randn(2, 4))
    assert len(watched.graphs) == 1


def test_a_graph_says_why_it_ends_and_where_its_nodes_were_made() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def function(x: Tensor) -> Tensor:
        x = model(x)
        torch._dynamo.graph_break()
        return x + 1

    watched = Watched(function)
    watched.run(torch.randn(2, 4))
    first, last = watched.graphs
    assert break_reason(first)
    assert break_reason(last) == ""
    made_in = {private.module_of(node) for node in first.graph.nodes}
    assert {id(model[0]), id(model[1])} <= made_in


def test_a_frame_that_cannot_be_followed_is_reported() -> None:
    def function(x: Tensor) -> Tensor:
        try:
            y = x.sum().item()
        finally:
            x = x + 1
        return x * y

    watched = Watched(function)
    watched.run(torch.randn(2, 4))
    assert any("function" in skipped or "inner" in skipped for skipped in watched.answers)


class Routed(nn.Module):
    """Data decide sizes; the code behind that closes over the module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, routes: Tensor) -> list[Tensor]:
        tokens = [torch.eq(routes, i).nonzero(as_tuple=True)[0] for i in range(2)]
        return [self.layer(x[tokens[i]]) for i in range(2)]


class InTurn(Watched):
    """Numbers its calls; keeps the modules that run another graph in each of them."""

    number = 0

    def __init__(self, function: Callable[..., Any]) -> None:
        self.others: list[Any] = []
        super().__init__(function)

    def call(self) -> tuple[int, Any]:
        return self.number, None

    def skipped(self, code: types.CodeType, module: Any, reason: str, error: Any) -> None:
        self.others += [module] * ("another graph in every call" in reason)


def test_a_module_is_known_whose_code_behind_a_break_is_another_graph_in_every_call() -> None:
    module = Routed()
    watched = InTurn(module.forward)
    for number in range(7):
        watched.number = number
        watched.run(torch.randn(8, 4), (torch.arange(8) > number).long())
    assert module in watched.others


def test_hooks_of_modules_are_guarded() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    watched = Watched(model.forward)
    x = torch.randn(2, 4)
    before = watched.run(x)
    model[0].register_forward_hook(lambda *_: _[-1] * 2)
    assert torch.equal(watched.run(x), before * 2)


def test_an_assignment_to_data_is_found_with_what_takes_it_back() -> None:
    model = nn.Linear(4, 4)

    def function(x: Tensor) -> Tensor:
        model.weight.data = model.weight.data * 2
        return model(x)

    watched = Watched(function)
    watched.run(torch.randn(2, 4))
    found = [private.undone_assignment(node) for node in watched.graphs[0].graph.nodes]
    (counted,) = (nodes for nodes in found if nodes is not None)
    assert len(counted) == (RELEASE < (2, 14))  # from there on nothing has to be taken back


@needs(LEAVES)
def test_the_forward_of_a_module_can_be_a_leaf() -> None:
    model = nn.LSTM(4, 4)

    def on_fakes(module: nn.Module, x: Tensor) -> Any:
        state = x.new_empty(1, 1, 4)
        return torch.empty_like(x), (state, state.clone())

    watched = Watched(model.forward, {nn.LSTM.forward: on_fakes})

    def function(x: Tensor) -> Tensor:
        return model(x)[0]

    watched = Watched(function, {nn.LSTM.forward: on_fakes})
    x = torch.randn(3, 1, 4)
    assert torch.equal(watched.run(x), model(x)[0])
    (graph,) = watched.graphs
    assert sum(private.is_leaf_call(node) for node in graph.graph.nodes) == 1
    assert not hasattr(nn.LSTM.forward, "_torchdynamo_leaf_real_fn")


class Masked(nn.Module):
    """Data decide how many rows it computes with; in a loop, in which no graph can end."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.counted = 0

    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for sign in (-1, 1):
            (rows,) = torch.where(sign * x[:, 0] > 0)
            if len(rows) > 1:
                y = y.index_add(0, rows, self.layer(x[rows]))
        return y


class Noting(Masked):
    def forward(self, x: Tensor) -> Tensor:
        self.counted += len(x[x[:, 0] > 0])
        return super().forward(x)


@needs(VALUES)
@pytest.mark.parametrize("kind", [Masked, Noting])
def test_what_python_changes_is_seen_whatever_data_decide(kind: type[Masked]) -> None:
    model = kind()
    watched = Watched(model.forward)
    with following_values(), torch.no_grad():
        watched.run(torch.randn(6, 4))
    assert [end.reason for end in watched.ends] == [""]
    assert watched.ends[0].acts == (kind is Noting)
    assert len(watched.graphs) == 1


@needs(VALUES)
def test_values_that_were_followed_are_let_go_of() -> None:
    model = Masked()
    live = meter_for("cpu").live_bytes()
    with following_values(), torch.no_grad():
        Watched(model.forward).run(torch.randn(6, 4))
    torch._dynamo.reset()
    gc.collect()
    assert meter_for("cpu").live_bytes() <= live


@needs(VALUES)
def test_a_forward_in_which_data_decide_sizes_is_asked_about() -> None:
    inner = Masked()
    model = nn.Sequential(nn.Linear(4, 4), inner)
    watched = Watched(model.forward, may_be_one_op=Masked.forward)
    x = torch.randn(6, 4)
    assert torch.equal(watched.run(x), model(x))
    ((file, line),) = {places[-1] for places in watched.places}
    assert file == __file__ and line > Masked.forward.__code__.co_firstlineno
    (given,) = watched.given
    assert given is not None and given.module is inner and given.args[0].shape == (6, 4)
