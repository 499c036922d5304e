"""What fit and step promise besides memory: nothing else changes, and misuse is named."""

from __future__ import annotations

import copy
import io
import pickle
import random
import subprocess
import sys
import types
from typing import Any

import pytest
import torch
from torch import nn

import tightfit
from tightfit.errors import (
    BadInput,
    InfeasibleBudget,
    NothingToTrain,
    SecondForward,
    TightfitError,
)
from tightfit.execution.attach import attached
from tightfit.plan.cache import PlanCache


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def batch(n: int = 5) -> torch.Tensor:
    return torch.randn(n, 8)


def fitted(model: nn.Module | None = None, budget="1GiB", **keywords) -> nn.Module:
    return tightfit.fit(model or small(), budget, costs="unit", **keywords)


class TestTheModuleStaysWhatItWas:
    def test_state_dict_type_and_signature(self):
        model = small()
        keys = list(model.state_dict())
        fitted(model)
        assert list(model.state_dict()) == keys
        assert type(model) is nn.Sequential
        assert "input" in str(model.forward.__signature__)
        assert not [
            k for k in vars(model) if not k.startswith("_") and k not in ("training", "forward")
        ]

    def test_unfit_gives_the_forward_back(self):
        model = fitted()
        tightfit.unfit(model)
        assert "forward" not in vars(model)
        with pytest.raises(BadInput, match="not fitted"):
            tightfit.unfit(model)

    def test_pickle_and_save_give_the_plain_model(self):
        model = fitted()
        x = batch()
        for copied in (
            pickle.loads(pickle.dumps(model)),
            _through_torch_save(model),
        ):
            assert torch.equal(copied(x), model(x))
            with pytest.raises(BadInput, match=r"(?s)neither a fitted model.*loaded as the plain"):
                tightfit.report(copied)
            assert "forward" not in vars(copied)

    def test_a_fitted_model_is_loaded_wherever_the_plain_one_is(self, capsys):
        buffer, model, x = io.BytesIO(), fitted(), batch()
        with torch.serialization.safe_globals([nn.Sequential, nn.Linear, nn.ReLU, nn.GELU]):
            torch.save({"model": model}, buffer)
            buffer.seek(0)
            loaded = torch.load(buffer, weights_only=True)["model"]
        assert "saved as the plain model: fit it again" in capsys.readouterr().err
        assert torch.equal(loaded(x), model(x))
        copied = copy.deepcopy(fitted(loaded))
        copied(x).sum().backward()
        assert tightfit.report(copied).plan is not None
        assert not {"__reduce_ex__", "__deepcopy__"} & set(vars(tightfit.unfit(loaded)))

    def test_deepcopy_is_fitted_by_itself(self):
        model = fitted()
        model(batch()).sum().backward()
        twin = copy.deepcopy(model)
        twin(batch()).sum().backward()
        assert tightfit.report(twin).plan is not tightfit.report(model).plan
        assert model[0].weight is not twin[0].weight

    def test_hooks_run_in_every_step(self):
        model = small()
        outer, inner = [], []
        model.register_forward_hook(lambda m, a, out: outer.append(1))
        fitted(model)
        for _ in range(3):
            model(batch()).sum().backward()
        model[0].register_forward_hook(lambda m, a, out: inner.append(1))
        model[0].register_forward_hook(lambda m, a, out: out * 2)
        for _ in range(2):
            model(batch()).sum().backward()
        assert len(outer) == 5 and len(inner) == 2
        plain = copy.deepcopy(tightfit.unfit(model))
        x = batch()
        fitted(model)
        assert torch.equal(model(x), plain(x))

    def test_wrappers_of_other_tools_stay_around_it(self):
        model = fitted()
        model.__dict__["forward"] = types.MethodType(  # as accelerate does
            torch.autocast("cpu", dtype=torch.bfloat16)(model.forward.__func__), model
        )
        for each in (model, copy.deepcopy(model)):
            output = each(batch())
            assert output.dtype == torch.bfloat16
            output.sum().backward()
            assert tightfit.report(each).plan is not None
        first = tightfit.report(model).budget_bytes
        fitted(model, "2GiB")(batch())
        assert tightfit.report(model).budget_bytes == 2 * first
        tightfit.unfit(model)
        assert model(batch()).dtype == torch.bfloat16
        with pytest.raises(BadInput, match="neither a fitted model"):
            tightfit.report(model)

    def test_training_around_it_is_noticed_until_it_is_left(self, capsys):
        """Also where the first fit of two, or one that was taken back, never ran a step."""
        x = batch()
        model = fitted()
        model[0](x).sum().backward()
        said = capsys.readouterr().err
        assert "of a fitted Sequential whose forward was not called" in said
        assert "The limit holds" in said and "methods=" not in said
        model = fitted(on_exceed="warn")
        with pytest.warns(UserWarning, match="trained without its plan"):
            model[0](x).sum().backward()
        model = fitted()
        first = attached(model)
        fitted(model)(x).sum().backward()
        model = fitted(tightfit.unfit(model))
        second = attached(model)
        tightfit.unfit(model)[0](x).sum().backward()
        assert not first.is_used and not second.is_used
        model = fitted()
        loss = model(x).sum()
        fitted(model)
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())

    def test_dynamo_compiles_nothing_of_it(self):
        graphs = []

        def backend(graph, inputs):
            graphs.append(graph)
            return graph.forward

        plain = small()
        model = fitted(copy.deepcopy(plain))
        compiled = torch.compile(model, backend=backend)
        x = batch()
        assert torch.equal(compiled(x), plain(x))
        compiled(x[:3]).sum().backward()
        assert not graphs
        assert tightfit.report(compiled).plan is not None

    def test_exports_hold_the_plain_model(self):
        model = fitted().eval()
        x = batch()
        exported = torch.export.export(model, (x,)).module()
        with pytest.warns(DeprecationWarning):
            traced = torch.jit.trace(model, x)
        with torch.no_grad():
            assert torch.equal(exported(x), model(x))
            assert torch.equal(traced(x), model(x))

    def test_no_grad_and_frozen_models_run_plainly(self):
        model = fitted()
        with torch.no_grad():
            assert not model(batch()).requires_grad
        model.requires_grad_(False)
        assert not model(batch()).requires_grad

    def test_parameters_may_move_or_be_replaced(self):
        model = fitted()
        model(batch()).sum().backward()
        model.double()
        out = model(batch().double())
        assert out.dtype == torch.float64
        out.sum().backward()

    def test_two_shapes_two_plans(self, capsys):
        model = fitted()
        for n in (5, 7, 5):
            model.zero_grad()
            model(batch(n)).sum().backward()
        said = capsys.readouterr().err
        assert said.count("making a new plan") == 1
        assert "size mismatch at index 0. expected 5, actual 7" in said


def _through_torch_save(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


class TestGradients:
    def test_accumulation_into_existing_gradients(self):
        plain = small()
        model = fitted(copy.deepcopy(plain))
        for seed in range(3):
            torch.manual_seed(seed)
            x = batch()
            for m in (plain, model):
                m(x).square().sum().backward()
        for a, b in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)

    def test_outputs_without_gradient_cost_no_tangent(self):
        class Two(nn.Module):
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(8, 8)

            def forward(self, x):
                h = self.a(x)
                return h.sum(), h * 2

        model = fitted(Two())
        for _ in range(4):
            loss, _ = model(batch())
            loss.backward()
        plan = tightfit.report(model).plan
        loss, extra = model(batch())
        assert extra.requires_grad
        (loss + extra.sum()).backward()  # planned again, and run at once
        loss, extra = model(batch())
        (loss + extra.sum()).backward()
        assert tightfit.report(model).plan != plan

    def test_a_loss_in_the_output_is_the_only_one_differentiated(self):
        class Output(dict):
            pass

        class Hugging(nn.Module):
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(8, 8)

            def forward(self, x):
                h = self.a(x)
                return {"loss": h.square().mean(), "logits": h}

        model = fitted(Hugging())
        out = model(batch())
        out["loss"].backward()
        assert model.a.weight.grad is not None

    def test_second_backward_is_refused_clearly(self):
        loss = fitted()(batch()).sum()
        loss.backward()
        with pytest.raises(TightfitError, match=r"second time.*retain_graph"):
            loss.backward()

    def test_a_parameter_changed_before_backward_is_refused(self):
        model = fitted()
        loss = model(batch()).sum()
        with torch.no_grad():
            model[2].weight.add_(1)
        with pytest.raises(TightfitError, match=r"parameter model.2.weight was changed in place"):
            loss.backward()

    def test_an_input_changed_before_backward_is_refused(self):
        model, x = fitted(), batch()
        loss = model(x).sum()
        x.div_(255)
        with pytest.raises(TightfitError, match=r"input 0 .*was changed in place.*x\.clone\(\)"):
            loss.backward()
        x = batch()
        model(x.clone()).sum().backward()

    def test_an_optimizer_that_steps_inside_backward(self):
        """Gradients arrive one group after the other and may be used and freed at once."""
        plain = small()
        model = fitted(copy.deepcopy(plain))
        x = batch()
        for each in (plain, model):

            def descend(parameter):
                with torch.no_grad():
                    parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None

            for parameter in each.parameters():
                parameter.register_post_accumulate_grad_hook(descend)
            for _ in range(3):
                each(x).square().sum().backward()
        for a, b in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(a, b)

    def test_second_forward_names_step(self):
        model = fitted(in_flight=1)
        first = model(batch())
        with pytest.raises(SecondForward, match=r"tightfit\.step"):
            model(batch())
        del first
        model(batch()).sum().backward()
        allowed = fitted(in_flight=2)
        (allowed(batch()).sum() + allowed(batch()).sum()).backward()


WARNED = """
import warnings
import torch, tightfit
from torch import nn
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
tightfit.fit(model, "2MiB", on_exceed="warn", costs="unit", cache=False)
x = torch.randn(8, 16)
model(x).sum().backward()
torch.zeros(4 << 20, dtype=torch.uint8)
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    model(x).sum().backward()
assert any("more than the budget" in str(each.message) for each in warned)
"""


class TestBudgets:
    @pytest.mark.parametrize("budget", ["80%", "8g", "12", "-3GiB", -5, 0, 1.5, "", None, "1 PB"])
    def test_malformed_budgets_change_nothing(self, budget):
        model = small()
        with pytest.raises(BadInput, match="budget"):
            tightfit.fit(model, budget)
        assert "forward" not in vars(model)

    def test_a_budget_below_the_constants_says_so(self):
        model = fitted(budget=100)
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(InfeasibleBudget) as error:
            model(batch())
        assert error.value.minimum_bytes is None or error.value.minimum_bytes > 100
        assert "100 B" in str(error.value)
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())

    def test_plenty_of_budget_recomputes_nothing(self):
        model = fitted()
        model(batch()).sum().backward()
        report = tightfit.report(model)
        assert report.overhead == 0
        assert report.status == "optimal"

    def test_an_earlier_plan_that_recomputes_nothing_is_best_at_once(self, monkeypatch):
        monkeypatch.setattr(PlanCache, "load", lambda *_: None)  # as where other things lie around
        for _ in range(2):
            model = fitted()
            model(batch()).sum().backward()
            assert tightfit.report(model).status == "optimal"

    def test_what_exceeds_the_budget_between_steps_is_refused(self):
        model = fitted(small(), "2MiB")
        x = batch()
        model(x).sum().backward()
        with pytest.raises(RuntimeError, match="the budget of 2097152 bytes"):
            torch.zeros(4 << 20, dtype=torch.uint8)
        model(x).sum().backward()
        tightfit.unfit(model)

    def test_what_exceeds_the_budget_between_steps_is_warned_of(self):
        """In a process of its own: steps that other tests have left under way add their budgets."""
        subprocess.run([sys.executable, "-c", WARNED], check=True, timeout=300)

    def test_prepare_plans_without_touching_anything(self):
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        fitted(model)
        before = copy.deepcopy(model.state_dict())
        x = batch()
        generator = torch.get_rng_state()
        report = tightfit.prepare(model, x)
        assert report.planned_peak_bytes <= 1 << 30
        assert torch.equal(generator, torch.get_rng_state())
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        assert all(p.grad is None for p in model.parameters())


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.calls = 0
        self.seen: list[torch.Tensor] = []

    def forward(self, x):
        return self.a(x).sum()


class TestWhatPythonDoes:
    """Dynamo follows it: as in plain PyTorch."""

    def trained(self, kind, *more):
        torch.manual_seed(0)
        plain = kind()
        found = []
        for model in (plain, fitted(copy.deepcopy(plain))):
            torch.manual_seed(1)
            random.seed(1)
            for _ in range(3):
                model(batch(), *more).sum().backward()
            found.append([*(p.grad for p in model.parameters()), torch.tensor(random.random())])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
        return model

    def test_a_counter(self):
        class Model(Counting):
            def forward(self, x):
                self.calls += 1
                return super().forward(x) * self.calls

        assert self.trained(Model).calls == 3

    def test_tensors_collected_in_a_list(self):
        class Model(Counting):
            def forward(self, x):
                self.seen.append(x)
                return super().forward(x)

        assert len(self.trained(Model).seen) == 3

    def test_python_random(self):
        class Model(Counting):
            def forward(self, x):
                return super().forward(x) * (2 if random.random() < 0.5 else 1)

        self.trained(Model)

    def test_a_strange_input(self):
        class Model(Counting):
            def forward(self, x, config):
                return super().forward(x)

        self.trained(Model, object())


class TestRefusals:
    """Each names the cause and a way out, and leaves the model as it was."""

    def test_numbers_that_are_drawn_once_are_no_reason(self):
        class Model(Counting):
            def forward(self, x):
                if not hasattr(self, "scale"):
                    self.scale = random.random()
                return self.a(x).sum() * self.scale

        plain, model = Model(), Model()
        model.load_state_dict(plain.state_dict())
        state, x = random.getstate(), batch()
        expected = plain(x)
        random.setstate(state)
        assert torch.equal(fitted(model)(x), expected)
        assert random.getstate() != state

    def test_a_number_that_is_computed_and_read_is_no_reason(self):
        class Model(Counting):
            def forward(self, x):
                return self.a(x).sum() / self.a(x).max().item()

        model = fitted(Model())
        for seed in range(3):
            torch.manual_seed(seed)
            x = batch()
            assert torch.equal(model(x), Model.forward(model, x))

    def test_nothing_to_train(self):
        step = tightfit.step(lambda x: x.sum(), modules=small(), budget="1GiB", costs="unit")
        with pytest.raises(NothingToTrain, match="gradient"):
            tightfit.prepare(step, batch())
        x = batch()
        assert torch.equal(step(x), x.sum())

    def test_fitting_a_part_of_a_fitted_model(self):
        model = fitted()
        with pytest.raises(BadInput, match="part of a fitted"):
            fitted(model[0])
        tightfit.unfit(model)
        fitted(model[0])
        with pytest.raises(BadInput, match="child module '0'"):
            fitted(model)


def test_step_puts_the_loss_inside():
    model = small()
    plain = copy.deepcopy(model)
    targets = torch.randint(0, 4, (5,))
    x = batch()

    def loss_of(inputs, labels):
        return nn.functional.cross_entropy(model(inputs), labels)

    planned = tightfit.step(loss_of, modules=model, budget="1GiB", costs="unit")
    planned(x, targets).backward()
    nn.functional.cross_entropy(plain(x), targets).backward()
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_an_exception_in_user_code_leaves_the_next_step_right():
    model = fitted()
    x = batch()
    expected = model(x)
    expected.sum().backward()
    model.zero_grad()
    with pytest.raises(ZeroDivisionError):
        out = model(x)
        _ = 1 / 0
    del out
    assert torch.equal(model(x), expected)


def peaks_where_the_loss_holds_much(budget: int) -> list[int]:
    """Train with gradients added up over two calls; return what each call held at most."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fitted(model, budget, optimizer=optimizer, cache=False, on_exceed="warn")
    x = torch.randn(256, 64)
    for _ in range(3):
        for _ in range(2):
            h = model(x)
            (h * h.sigmoid().exp() * h.tanh()).mean().backward()
            del h
        optimizer.step(), optimizer.zero_grad()
    attached(model).close_step()
    return [step.peak_bytes for step in attached(model).guard.steps]


def test_what_the_loss_holds_is_planned_for_with_accumulated_gradients_too() -> None:
    """The first step's plan has room for it by chance; the next one has gradients to hold."""
    plenty = peaks_where_the_loss_holds_much(1 << 30)
    assert max(plenty) > max(plenty[::2])  # with gradients there from before
    budget = max(plenty) - 4096
    assert max(peaks_where_the_loss_holds_much(budget)) <= budget


def test_garbage_from_before_hides_nothing_of_what_the_loss_holds() -> None:
    """The model of the first training is garbage when the first step of the second is measured."""
    other = fitted(small())
    awaits = other(batch())
    budget = max(peaks_where_the_loss_holds_much(1 << 30)) - 4096
    left: list[Any] = [torch.empty(1 << 20)]
    left.append(left)
    del left
    assert max(peaks_where_the_loss_holds_much(budget)) <= budget
    awaits.sum().backward()
