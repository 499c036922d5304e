"""From `fit` on nothing exceeds the budget, in loops as people write them."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional

import tightfit
from tightfit.allocator import CpuMeter
from tightfit.errors import BudgetExceeded, InfeasibleBudget
from tightfit.session import stages
from tightfit.session.memory.account import Account

MIB = 1 << 20
Peak = Callable[[], int]


@pytest.fixture
def metered() -> Iterator[Callable[[nn.Module], Peak]]:
    """Return what begins to meter a model, and then tells the most that was held since."""

    def begin(model: nn.Module) -> Peak:
        own = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        meter = CpuMeter()
        start = meter.live_bytes()
        return lambda: meter.peak_bytes() - start + own

    yield begin


def dense(layers: int = 8, width: int = 128) -> nn.Sequential:
    torch.manual_seed(0)
    pairs = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)]
    return nn.Sequential(*pairs)


def fit(model: nn.Module, budget: int, **keywords: object) -> nn.Module:
    return tightfit.fit(model, budget, costs="unit", cache=False, limits=(1, 0.01), **keywords)


def accumulate(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    torch.manual_seed(1)
    losses = []
    for _ in range(4):
        for _micro in range(2):
            loss = model(torch.randn(256, 128)).square().mean()
            loss.backward()
            losses.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_an_optimizer_that_nobody_named_and_gradients_that_are_added_up(metered) -> None:
    plain, model = dense(), dense()
    expected = accumulate(plain, torch.optim.Adam(plain.parameters()))
    del plain
    peak = metered(model)
    fit(model, budget := int(3.6 * MIB))
    losses = accumulate(model, torch.optim.Adam(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True))
    assert peak() <= budget
    assert tightfit.report(model).overhead > 0


def test_a_forward_of_another_model_that_is_never_differentiated_hides_nothing(metered) -> None:
    other = fit(dense(2), 2 * MIB)
    kept = other(torch.randn(32, 128))
    model = dense()
    peak = metered(model)
    fit(model, budget := int(3.6 * MIB))
    accumulate(model, torch.optim.Adam(model.parameters()))
    assert peak() <= budget
    kept.sum().backward()


def test_what_the_step_before_returned_counts(metered) -> None:
    class WithLogits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = dense(4)

        def forward(self, x):
            logits = self.body(x)
            return logits, logits.square().mean()

    torch.manual_seed(0)
    model = WithLogits()
    peak = metered(model)
    fit(model, budget := int(3.0 * MIB))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        logits, loss = model(torch.randn(512, 128))  # the old ones live until these are there
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert logits.shape == (512, 128)
    assert peak() <= budget


def test_averaged_weights_that_are_made_on_the_way_count(metered) -> None:
    model = dense()
    peak = metered(model)
    fit(model, budget := int(3.6 * MIB))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = None
    for _ in range(6):
        model(torch.randn(256, 128)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average = average or copy.deepcopy(model).requires_grad_(False)
    assert peak() <= budget


def test_copies_that_train_share_the_budget(metered) -> None:
    """As in federated or meta-learning: copies train for a while, and their mean is taken over."""
    torch.manual_seed(0)
    model = dense()
    peak = metered(model)
    fit(model, budget := int(4.5 * MIB))
    for _ in range(2):
        copies = [copy.deepcopy(model) for _ in range(2)]
        for each in (*copies, model):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            for _ in range(3):
                each(torch.randn(256, 128)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        del each, optimizer
        with torch.no_grad():
            for parameter, *others in zip(*(m.parameters() for m in (model, *copies)), strict=True):
                parameter.copy_(sum(others) / 2)
        del copies, others
    assert peak() <= budget
    held = [torch.zeros(MIB // 4)]
    with pytest.raises(RuntimeError, match="no room for a further"):
        while len(held) < 32:
            held.append(torch.zeros(MIB // 4))
    assert peak() <= budget


def test_averaged_weights_that_are_evaluated_leave_the_limit_as_it_is() -> None:
    model = dense()
    fit(model, 4 * MIB)
    average = copy.deepcopy(model)
    model(torch.randn(256, 128)).square().mean().backward()
    with torch.no_grad():
        average(torch.randn(16, 128))
    held = []
    with pytest.raises(RuntimeError, match="no room for a further"):
        while len(held) < 6:
            held.append(torch.zeros(MIB // 4))


def test_the_step_of_an_optimizer_is_refused_before_it_begins() -> None:
    model = nn.Linear(512, 512)
    fit(model, 6 * MIB)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.randn(4, 512)).sum().backward()
    del before[1:]
    extra = torch.zeros(MIB // 8)
    with pytest.raises(BudgetExceeded, match="fused=True fits"):
        optimizer.step()
    assert torch.equal(before[0], model.weight)
    assert not optimizer.state
    del extra


@pytest.mark.parametrize(
    ("accumulates", "rows", "loss"),
    [
        (False, 256, lambda made, x: made.square().mean()),
        (True, 256, lambda made, x: made.square().mean()),
        (True, 2048, functional.mse_loss),  # whose number keeps as many bytes as it compared
    ],
    ids=["every step", "every second step", "reconstructing"],
)
def test_the_budget_that_is_advised_holds_for_further_steps(
    metered, accumulates, rows, loss
) -> None:
    model = dense(6)
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(rows, 128)  # which the first budget alone would not have room for
    fit(model, MIB)
    with pytest.raises(InfeasibleBudget) as refused:
        model(x)
    budget = refused.value.minimum_bytes
    assert budget is not None
    tightfit.unfit(model)
    del x
    peak = metered(model)
    fit(model, budget)
    for step in range(20):
        x = torch.randn(rows, 128)
        made = model(x)
        error = loss(made, x)  # lives until the next one is there, as what was made
        error.backward()
        if step % 2 or not accumulates:
            optimizer.step()
            optimizer.zero_grad()
    assert peak() <= budget


class Convolutions(nn.Module):
    """Convolutions whose workspace is larger than what they make."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
            for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def test_what_a_refusal_names_trains_and_a_tenth_less_does_not(metered) -> None:
    images = torch.randn(16, 3, 32, 32)

    def trained(budget: int) -> None:
        model = Convolutions()
        peak = metered(model)
        tightfit.fit(model, budget, cache=False, limits=(1, 0.01))  # measures operators
        for _ in range(2):
            model(images).backward()
            model.zero_grad()
        assert peak() <= budget

    with pytest.raises(InfeasibleBudget) as refused:
        trained(2 * MIB)  # less than its largest operators need: they run on fewer rows
    named = refused.value.minimum_bytes
    assert named is not None
    trained(named)
    with pytest.raises(InfeasibleBudget):
        trained(int(0.9 * named))


def test_models_that_share_a_budget_take_turns(metered) -> None:
    """A plain run of both holds little more than of one: neither is refused what it needs."""
    first, second = dense(4), dense(4)
    budget = tightfit.Budget(int(3.0 * MIB))
    peak = metered(nn.ModuleList([first, second]))
    for model in (first, second):
        tightfit.fit(model, budget, costs="unit", cache=False)
    for _ in range(3):
        for model in (first, second):
            model(torch.randn(256, 128)).square().mean().backward()
            model.zero_grad()
    assert peak() <= budget.size_bytes


def test_the_step_of_a_model_that_was_not_called_last_is_refused_too() -> None:
    """Within a budget of several, each keeps to it, whoever was called last."""
    first, second = nn.Linear(512, 512), nn.Linear(8, 8)
    budget = tightfit.Budget(5 * MIB)
    for model in (first, second):
        tightfit.fit(model, budget, costs="unit", cache=False)
    optimizer = torch.optim.AdamW(first.parameters(), foreach=True)
    first(torch.randn(4, 512)).sum().backward()
    second(torch.randn(4, 8)).sum().backward()
    extra = torch.zeros(MIB // 8)
    with pytest.raises(BudgetExceeded, match="fused=True fits"):
        optimizer.step()
    assert not optimizer.state
    del extra


def test_a_call_without_a_backward_keeps_to_the_budget(metered) -> None:
    model = dense(4)
    peak = metered(model)
    fit(model, budget := 2 * MIB)
    model(torch.randn(256, 128)).square().mean().backward()
    with torch.no_grad():
        assert model(torch.empty(0, 128)).shape == (0, 128)
        with pytest.raises(BudgetExceeded, match="A smaller batch helps"):
            model(torch.randn(2048, 128))
    model(torch.randn(256, 128)).square().mean().backward()
    assert peak() <= budget


def test_models_that_are_called_several_times_in_turns(metered) -> None:
    """A discriminator sees what is real and what is not before its backward."""

    def trained(generator: nn.Module, critic: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(2)
        optimizers = [torch.optim.Adam(each.parameters()) for each in (generator, critic)]
        losses = []
        for _ in range(4):
            optimizers[0].zero_grad()
            fakes = generator(torch.randn(1024, 128))
            loss = critic(fakes).square().mean()
            loss.backward()
            optimizers[0].step()
            losses.append(loss.detach().clone())
            optimizers[1].zero_grad()
            real = critic(torch.randn(1024, 128)).square().mean()
            loss = real - critic(fakes.detach()).square().mean()
            loss.backward()
            optimizers[1].step()
            losses.append(loss.detach().clone())
        return losses

    plain = dense(5), dense(5)
    reached = metered(nn.ModuleList(plain))
    expected = trained(*plain)
    budget = tightfit.Budget(int(0.8 * reached()))
    del plain
    models = dense(5), dense(5)
    peak = metered(nn.ModuleList(models))
    for model in models:
        tightfit.fit(model, budget, costs="unit", cache=False)
    assert all(torch.equal(a, b) for a, b in zip(trained(*models), expected, strict=True))
    assert peak() <= budget.size_bytes


def test_weights_that_lie_elsewhere_count_once() -> None:
    """Averages of weights are often put in the place of what was there before `fit`."""
    model = nn.Linear(64, 64)
    account = Account({"": model}, None)
    account.set_limit(1 << 30)
    account.enforce()
    held_bytes = account.held_bytes()
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.9
    account.enforce()
    assert account.held_bytes() == held_bytes > 0
    account.set_limit(None)


def test_what_user_code_takes_between_steps_is_refused_before_it_is_given(metered) -> None:
    """A teacher that runs outside, before the first step and between others."""
    student, teacher = dense(2), dense(2, 128)
    peak = metered(student)
    fit(student, 2 * MIB, optimizer=torch.optim.SGD(student.parameters(), lr=0.1))
    for _ in range(3):
        x = torch.randn(64, 128)
        with pytest.raises(RuntimeError, match="tightfit: the budget of 2097152 bytes"):
            teacher(torch.randn(4096, 128))
        with torch.no_grad():
            expected = teacher(x)
        functional.mse_loss(student(x), expected).backward()
    assert peak() <= 2 * MIB
    tightfit.unfit(student)
    assert teacher(torch.randn(4096, 128)).shape == (4096, 128)


def test_a_model_that_nobody_has_any_more_limits_nobody() -> None:
    model = dense(2)
    fit(model, MIB)
    model(torch.randn(8, 128)).sum().backward()
    del model
    torch.zeros(4 * MIB)


def test_weights_that_a_call_puts_in_place_count_in_addition(metered) -> None:
    """As in meta-learning, where the first weights are still there."""
    model = dense(4)
    own = sum(p.nbytes for p in model.parameters())
    peak = metered(model)
    fit(model, 16 * own)
    fast = {name: (p * 1.01).detach().requires_grad_() for name, p in model.named_parameters()}
    for _ in range(2):
        loss = torch.func.functional_call(model, fast, (torch.randn(16, 128),)).square().mean()
        with pytest.raises(RuntimeError, match="no room for a further"):
            torch.empty((16 * own - peak() + own // 2) // 4)
        loss.backward()
    assert peak() <= 16 * own


def test_weights_that_are_put_in_place_between_steps_count_once() -> None:
    """As people write averages of weights: `target.data = target.data * m + online.data * (1 - m)`.

    The weights that were there when the model was fitted are gone then.
    """
    model = dense(4, 256)
    own = sum(p.nbytes for p in model.parameters())
    fit(model, 3 * own, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        model(torch.randn(16, 256)).sum().backward()
        for p in model.parameters():
            p.data = p.data * 0.99 + p.data * 0.01
        model.zero_grad()
        torch.zeros(own // 8)


def test_a_worker_of_a_data_loader_keeps_no_budget() -> None:
    model = dense(2)
    fit(model, MIB)
    loader = torch.utils.data.DataLoader(
        Large(), batch_size=1, num_workers=1, multiprocessing_context="fork"
    )
    for (x,) in zip(loader, strict=True):
        model(x).sum().backward()


class Large(torch.utils.data.Dataset):
    """Samples made of more than the budget of the model."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(8 * MIB // 512, 128)[index]


def test_a_budget_below_the_parameters_is_refused_before_anything_is_captured(monkeypatch) -> None:
    model = dense(8)
    optimizer = torch.optim.Adam(model.parameters())
    parameter_bytes = sum(p.nbytes for p in model.parameters())
    fit(model, parameter_bytes - 1, optimizer=optimizer)
    monkeypatch.setattr(stages, "capture", lambda *_, **__: pytest.fail("it is captured"))
    with pytest.raises(InfeasibleBudget, match="parameters and buffers take") as refused:
        model(torch.randn(16, 128))
    assert refused.value.proven
    assert f"none fits less than {parameter_bytes} " in str(refused.value)
    named = refused.value.minimum_bytes
    assert named is not None and named >= 4 * parameter_bytes  # gradients, Adam's two averages
    before = model[0][0].weight.detach().clone()
    optimizer.zero_grad()
    assert torch.equal(before, model[0][0].weight)


def test_a_refusal_says_whether_a_plan_can_give_the_room() -> None:
    """Between calls none can; between forward and backward that of a whole step can."""
    model = dense(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    fit(model, 2 * MIB, optimizer=optimizer)
    for stepped in (False, True):
        loss = model(torch.randn(64, 128)).square().mean()
        with pytest.raises(RuntimeError, match="plans that code, too"):
            torch.zeros(MIB)
        loss.backward()
        del loss
        with pytest.raises(RuntimeError, match="no plan can give it room") as refused:
            torch.zeros(MIB)
        assert "tightfit.step" not in str(refused.value)
        held, named = (
            int(n)
            for n in re.findall(r"(\d+) bytes \([^)]*\)(?: are held|, or hold)", str(refused.value))
        )
        coming = 0 if stepped else sum(p.nbytes for p in model.parameters())  # momentum
        assert named == held + 2 * 4 * MIB + coming
        optimizer.step()


def test_the_budget_named_in_a_backward_counts_what_is_held_in_the_optimizers_step() -> None:
    """Its state comes on top of what others hold, too: a buffer of samples, say."""
    model = dense(4, 256)
    own = sum(p.nbytes for p in model.parameters())
    optimizer = torch.optim.Adam(model.parameters())
    fit(model, 8 * own, optimizer=optimizer)
    loss = model(torch.randn(8, 256)).square().mean()
    samples = torch.empty(int(6.5 * own) // 4)
    with pytest.raises(BudgetExceeded) as refused:
        loss.backward()
    assert refused.value.measured_bytes >= 4 * own + samples.nbytes
