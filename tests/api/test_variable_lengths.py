"""Inputs of many lengths: a plan at once, a better one between two steps, the worst case first."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import tightfit
from support.planning import planners_called
from support.searches import wait_for_searches
from tightfit.errors import BadInput, InfeasibleBudget
from tightfit.execution.attach import attached
from tightfit.planners.background import Search, searching
from tightfit.session import stages
from tightfit.session.fitted import prepare_all

WIDTH = 64


class Reader(nn.Module):
    """Reads a sequence [N, T, 64]; returns a loss. Twelve layers whose activations grow with T."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(12)]
        self.layers = nn.Sequential(*layers)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.layers(x)).square().mean()


def sequence(length: int) -> torch.Tensor:
    return torch.randn(4, length, WIDTH)


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    model(x).backward()
    return [p.grad for p in model.parameters()]


def reader() -> Reader:
    torch.manual_seed(0)
    return Reader()


def eager_peak_bytes(length: int) -> int:
    session = attached(tightfit.fit(reader(), "1GiB", costs="unit"))
    prepare_all(session, [sequence(length)])
    return session.last.outcome.peak_bytes


class TestFurtherShapes:
    def test_every_length_holds_the_budget_and_equals_plain_pytorch(self, capsys):
        budget_bytes = int(0.8 * eager_peak_bytes(256))
        plain = reader()
        batches = [sequence(length) for length in (64, 128, 256, 200, 256)]
        expected = [gradients(plain, x) for x in batches]  # for which the budget has no room
        model = tightfit.fit(copy.deepcopy(plain), budget_bytes, cache=False)
        for x, plainly in zip(batches, expected, strict=True):
            mine = gradients(model, x)
            assert attached(model).close_step().peak_bytes <= budget_bytes
            for own, theirs in zip(mine, plainly, strict=True):
                assert torch.equal(own, theirs)
            wait_for_searches(model)
        assert capsys.readouterr().err.count("making a new plan") == 3

    def test_costs_are_scaled_not_measured(self):
        model = tightfit.fit(reader(), "1GiB", cache=False)
        gradients(model, sequence(64))
        gradients(model, sequence(128))
        first, second = attached(model).specialisations
        assert first.captured.graph.cost_source == "measured"
        assert second.captured.graph.cost_source == "measured, scaled from another shape"
        cost = [
            sum(op.alternatives[0].variants[0].cost_s for op in s.captured.graph.ops)
            for s in (first, second)
        ]
        assert cost[1] == pytest.approx(2 * cost[0], rel=0.2)

    def test_a_better_plan_takes_over_between_two_steps(self, monkeypatch):
        """The first plan is what is found at once; the search's is taken when found."""
        monkeypatch.setattr(stages, "_AT_ONCE_S", 0.0)
        budget_bytes = int(0.55 * eager_peak_bytes(256))
        model = tightfit.fit(reader(), budget_bytes, costs="unit", cache=False)
        session = attached(model)
        gradients(model, sequence(64))
        gradients(model, sequence(256))
        at_once = session.last.outcome
        wait_for_searches(model)
        gradients(model, sequence(256))
        assert session.last.outcome.overhead <= at_once.overhead
        assert not any(shape.searches for shape in session.specialisations)

    def test_an_earlier_process_already_knows_the_plan(self, tmp_path, monkeypatch):
        monkeypatch.setenv("TIGHTFIT_CACHE_DIR", str(tmp_path))
        searched = planners_called(monkeypatch, stages, "plan_with", "plan_apart")
        budget_bytes = int(0.7 * eager_peak_bytes(256))
        for process in range(2):
            model = reader()
            optimizer = torch.optim.SGD(model.parameters())
            tightfit.fit(model, budget_bytes, optimizer=optimizer, costs="unit")
            gradients(model, sequence(64))
            gradients(model, sequence(256))
            wait_for_searches(model)
            assert bool(searched) == (process == 0)
            searched.clear()

    def test_the_least_recently_used_plans_go(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        tightfit.fit(model, "1GiB", costs="unit", cache=False)
        for length in range(1, 20):
            for _ in range(2):  # lengths that never come again would not be planned for ever
                model(torch.randn(length, 4)).sum().backward()
        assert len(attached(model).specialisations) == 16


class TestExpectedShapes:
    def test_the_worst_case_is_planned_first(self):
        model = tightfit.fit(
            reader(),
            "1GiB",
            costs="unit",
            shapes=[sequence(8), (sequence(32),), {"x": sequence(4)}],
        )
        sizes = [
            max(v.size_bytes for v in shape.captured.graph.values if v.role == "input")
            for shape in attached(model).specialisations
        ]
        assert sizes == sorted(sizes, reverse=True)
        assert len(sizes) == 3

    def test_shapes_may_be_given_as_meta_tensors(self):
        meta = torch.empty(4, 32, WIDTH, device="meta")
        model = tightfit.fit(reader(), "1GiB", costs="unit", shapes=[meta])
        gradients(model, sequence(32))
        assert len(attached(model).specialisations) == 1

    def test_what_does_not_fit_leaves_the_model_as_it_was(self):
        budget_bytes = eager_peak_bytes(32)
        model = reader()
        with pytest.raises(InfeasibleBudget):
            tightfit.fit(model, budget_bytes, costs="unit", shapes=[sequence(4), sequence(4096)])
        assert "forward" not in vars(model)

    def test_shapes_of_another_form_are_refused_by_name(self):
        with pytest.raises(BadInput, match="shapes= takes for each shape a tuple"):
            tightfit.fit(reader(), "1GiB", shapes=[(1, 2), 32])


class TestSearch:
    def test_cancelled_searches_end_and_find_nothing(self):
        def endless(progress):
            while True:
                progress.update(0)

        search = Search(endless)
        assert searching()
        search.cancel()
        search.wait(5)
        assert search.is_done
        assert search.result() is None

    def test_what_a_planner_raises_reaches_the_training_loop(self):
        def wrong(progress):
            raise ZeroDivisionError

        search = Search(wrong)
        search.wait(5)
        with pytest.raises(ZeroDivisionError):
            search.result()


class Distances(nn.Module):
    """Attention that is weaker with distance: a table made when it is first needed, and grown."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.register_buffer("table", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        if self.table is None or self.table.shape[0] < length:
            places = torch.arange(length)
            distances = (places[:, None] - places[None]).abs().float()
            self.register_buffer("table", distances, persistent=False)
        y = self.project(x)
        weights = (y @ y.transpose(1, 2) - self.table[:length, :length]).softmax(-1)
        return (weights @ y).square().mean()


def test_a_table_that_forward_makes_and_grows_is_as_in_plain_pytorch() -> None:
    inputs = [torch.randn(2, length, 8) for length in (4, 4, 6, 3)]
    torch.manual_seed(0)
    plain = Distances()
    model = tightfit.fit(copy.deepcopy(plain), "1GiB", costs="unit", cache=False)
    for x in inputs:
        for each in (plain, model):
            each.zero_grad(set_to_none=True)
            each(x).backward()
        assert torch.equal(model.project.weight.grad, plain.project.weight.grad)
        assert torch.equal(model.table, plain.table)
    assert model.state_dict().keys() == plain.state_dict().keys()
