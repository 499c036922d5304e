"""`offload=`: less memory than recomputing needs, or less time, with the bits of plain PyTorch."""

from __future__ import annotations

import copy
import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tightfit
from support.deep import Deep
from support.late_streams import ORDERS, LateStreams, WatchedStep, at_random, pinned_memory
from tightfit.errors import BadInput, InfeasibleBudget, OffloadFailed
from tightfit.execution.attach import attached
from tightfit.execution.far import links
from tightfit.execution.far.memory import FarMemory
from tightfit.plan.plan import Store
from tightfit.session.options import make_options, refuse_on

STEPS = 20


def batch(step: int) -> torch.Tensor:
    torch.manual_seed(step)
    return torch.randn(2048, 96)


def train(model: nn.Module, steps: int = STEPS) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        loss = model(batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


ANY_PLAN = (20, 1.0)
"""Long enough for a search on a busy machine, which ends with the first plan that moves."""


def assert_same(one: nn.Module, other: nn.Module) -> None:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Deep()


@pytest.fixture(scope="module")
def least_bytes(model: nn.Module) -> int:
    """The least budget without moves, the optimizer's state included."""
    own = copy.deepcopy(model)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9)
    tightfit.fit(own, "1GiB", optimizer=optimizer, cache=False, limits=(20, 0.01))
    return attached(own).smallest_budget((batch(0),), {}).found_bytes


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link of the same speed on every machine."""
    speed = links.Link(2e9, 4e9, 2e-5)
    monkeypatch.setattr(links, "file_link", lambda folder, *, keeps: speed)


def fitted(model: nn.Module, budget: int, **keywords: Any) -> nn.Module:
    own = copy.deepcopy(model)
    return tightfit.fit(own, budget, **{"limits": ANY_PLAN, **keywords})


def test_less_memory_than_recomputing_needs(
    model: nn.Module, least_bytes: int, link: None, tmp_path: Path
) -> None:
    plain = copy.deepcopy(model)
    expected = train(plain)
    budget = int(0.85 * least_bytes)
    with pytest.raises(InfeasibleBudget):
        train(fitted(model, budget, limits=(2, 0.01)), 1)
    mine = fitted(model, budget, offload="64MiB")
    assert all(map(torch.equal, train(mine), expected))
    assert_same(mine, plain)
    report = tightfit.report(mine)
    assert report.measured_peak_bytes is not None and report.measured_peak_bytes <= budget
    assert report.moves is not None and report.measured_moves is not None
    assert report.moves.stored_bytes == report.measured_moves.stored_bytes > 0
    assert "to far memory" in str(report)
    assert "for far memory" in report.html(tmp_path / "page.html").read_text("utf-8")


@pytest.mark.parametrize("choose", [*ORDERS.values(), at_random(0)], ids=[*ORDERS, "random"])
def test_streams_copy_as_on_a_gpu(
    model: nn.Module,
    least_bytes: int,
    link: None,
    monkeypatch: pytest.MonkeyPatch,
    choose: Callable[[int], int],
) -> None:
    plain = copy.deepcopy(model)
    expected = train(plain, 6)
    streams = LateStreams(choose)
    memory = pinned_memory(64 << 20, streams, 1 << 20)
    monkeypatch.setattr(FarMemory, "begin_step", lambda self, device: WatchedStep(memory))
    memory.take_back([memory.lend() for _ in range(64)])  # now: a GPU's budget does not count it
    budget = int(0.85 * least_bytes)
    mine = fitted(model, budget, offload="64MiB")
    assert all(map(torch.equal, train(mine, 6), expected))
    streams.run_all()
    assert_same(mine, plain)
    report = tightfit.report(mine)
    assert report.moves is not None and report.measured_moves is not None
    assert report.moves.stored_bytes == report.measured_moves.stored_bytes > 0
    assert report.measured_moves.stall_s > 0
    assert report.measured_peak_bytes is not None and report.measured_peak_bytes <= budget
    assert memory.pinned_bytes == 64 << 20


def test_a_step_with_the_loss_inside(model: nn.Module, least_bytes: int, link: None) -> None:
    plain, own = copy.deepcopy(model), copy.deepcopy(model)
    expected: list[torch.Tensor] = []
    for number in range(3):  # before there is a limit
        loss = plain(batch(number)) * 2.0
        loss.backward()
        expected.append(loss.detach())
    step = tightfit.step(
        lambda x: own(x) * 2.0,
        modules=own,
        budget=int(0.85 * least_bytes),
        offload="64MiB",
        cache=False,
        limits=ANY_PLAN,
    )
    for number in range(3):
        loss = step(batch(number))
        assert torch.equal(loss, expected[number])
        loss.backward()
    assert all(map(torch.equal, gradients(own), gradients(plain)))
    assert tightfit.report(step).moves is not None


def test_the_optimizer_may_step_in_backward_too(
    model: nn.Module, least_bytes: int, link: None
) -> None:
    plain, own = copy.deepcopy(model), copy.deepcopy(model)
    expected = train(plain, 4)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9)
    tightfit.fit(
        own,
        int(0.85 * least_bytes),
        optimizer=optimizer,
        update_in_backward=True,
        offload="64MiB",
        cache=False,
        limits=ANY_PLAN,
    )
    for step in range(4):
        loss = own(batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(loss, expected[step])
    assert_same(own, plain)


def wide(width: int = 1024, depth: int = 8) -> nn.Sequential:
    """32 MiB of parameters, most of what a step takes."""
    torch.manual_seed(0)
    layers = (m for _ in range(depth) for m in (nn.Linear(width, width), nn.Tanh()))
    return nn.Sequential(*layers, nn.Linear(width, 1))


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        loss = model(torch.randn(16, 1024)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("foreach", [False, True])
def test_a_model_of_two_and_a_half_times_the_budget_trains(foreach: bool, link: None) -> None:
    """Parameters, gradients and state: most of the state is in a file."""
    plain, own = wide(), wide()
    adam = torch.optim.AdamW(plain.parameters(), foreach=foreach)
    stepped(plain, adam, 5)
    parameter_bytes = sum(p.nbytes for p in own.parameters())
    budget = int(4 * parameter_bytes / 2.5)
    optimizer = torch.optim.AdamW(own.parameters(), foreach=foreach)
    far = tightfit.Offload("128MiB", optimizer_state=True)
    keywords: dict[str, Any] = {"update_in_backward": True, "offload": far, "cache": False}
    tightfit.fit(own, budget, optimizer=optimizer, **keywords)
    stepped(own, optimizer, 5)
    assert_same(own, plain)
    report = tightfit.report(own)
    assert report.measured is not None and report.measured.peak_bytes <= budget
    expected, found = (o.state_dict()["state"] for o in (adam, optimizer))
    for number, state in expected.items():
        assert all(torch.equal(value, found[number][key]) for key, value in state.items())


def test_gradients_are_moved_until_their_norm_is_known(link: None) -> None:
    plain, own = wide(256), wide(256)
    sgd, mine = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, own))
    for step in range(4):
        torch.manual_seed(step)
        plain(torch.randn(8, 256)).square().mean().backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        sgd.step()
        sgd.zero_grad()
    budget = int(1.6 * sum(p.nbytes for p in own.parameters()))
    keywords: dict[str, Any] = {"clip_grad_norm": 0.01, "offload": "64MiB", "cache": False}
    tightfit.fit(own, budget, optimizer=mine, limits=ANY_PLAN, **keywords)
    for step in range(4):
        torch.manual_seed(step)
        own(torch.randn(8, 256)).square().mean().backward()
        mine.step()
        mine.zero_grad()
    assert_same(own, plain)
    last = attached(own).last
    moved = {s.value for s in last.outcome.plan.instructions if isinstance(s, Store)}
    assert any(last.graph.values[value].role == "gradient" for value in moved)


def test_state_that_exists_is_moved_and_stays_right(link: None, tmp_path: Path) -> None:
    plain, own = wide(depth=1), wide(depth=1)
    pairs = [(m, torch.optim.Adam(m.parameters(), amsgrad=True)) for m in (plain, own)]
    for each in pairs:
        stepped(*each, 2)
    far = tightfit.Offload("64MiB", folder=tmp_path, optimizer_state=True)
    optimizer = pairs[1][1]
    tightfit.fit(own, "1GiB", optimizer=optimizer, update_in_backward=True, offload=far)
    assert not any(tmp_path.iterdir())  # files without names
    weight = own[0].weight
    assert optimizer.state[weight]["exp_avg"].untyped_storage().filename is not None
    for each in pairs:
        stepped(*each, 2)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    tightfit.unfit(own)
    for each in pairs:
        stepped(*each, 2)
    assert_same(own, plain)


def test_state_for_which_there_is_no_room_is_refused(
    monkeypatch: pytest.MonkeyPatch, link: None
) -> None:
    model = wide(depth=1)
    optimizer = torch.optim.Adam(model.parameters())

    def fit(far: tightfit.Offload, **keywords: Any) -> None:
        tightfit.fit(model, "1GiB", optimizer=optimizer, offload=far, **keywords)

    with pytest.raises(BadInput, match="needs update_in_backward=True"):
        fit(tightfit.Offload("1GiB", optimizer_state=True))
    with pytest.raises(BadInput, match=r"takes 8\.00 MiB in far memory.*at least 8388608"):
        fit(tightfit.Offload("1MiB", optimizer_state=True), update_in_backward=True)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    fit(tightfit.Offload("1GiB", optimizer_state=True), update_in_backward=True)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OffloadFailed, match=r"No space left.*a folder with more room"):
        stepped(model, optimizer, 1)


def test_a_far_budget_that_is_too_small_is_refused_with_the_one_to_try(
    model: nn.Module, least_bytes: int, link: None
) -> None:
    budget = int(0.85 * least_bytes)
    mine = fitted(model, budget, offload="100KB", limits=(3, 1.0))
    with pytest.raises(InfeasibleBudget, match=r"97\.66 KiB of far memory") as caught:
        train(mine, 1)
    text = str(caught.value)
    assert 'a plan fits with offload="' in text
    enough = text.split('a plan fits with offload="')[1].split('"')[0]
    train(fitted(model, budget, offload=enough), 2)


def test_a_full_disk_amid_a_step(
    model: nn.Module, least_bytes: int, link: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = copy.deepcopy(model)
    train_once(plain)
    mine = fitted(model, int(0.85 * least_bytes), offload="64MiB")
    before = [p.detach().clone() for p in mine.parameters()]
    train_once(mine)
    left, write = [3], os.pwrite

    def full(*given: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*given)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OffloadFailed, match="No space left on device"):
        train_once(mine)
    monkeypatch.undo()
    assert all(map(torch.equal, mine.parameters(), before))
    assert not copying_threads()
    train_once(mine)
    assert all(map(torch.equal, gradients(mine), gradients(plain)))


@pytest.mark.parametrize("direction", ["pwrite", "preadv"])
def test_ctrl_c_amid_a_transfer(
    model: nn.Module,
    least_bytes: int,
    link: None,
    monkeypatch: pytest.MonkeyPatch,
    direction: str,
) -> None:
    plain = copy.deepcopy(model)
    train_once(plain)
    mine = fitted(model, int(0.85 * least_bytes), offload="64MiB")
    train_once(mine)
    before = [p.detach().clone() for p in mine.parameters()]
    function, main = getattr(os, direction), threading.main_thread().ident
    assert main is not None

    def pressed(*given: Any) -> int:
        monkeypatch.undo()
        signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.2)
        return function(*given)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        monkeypatch.setattr(os, direction, pressed)
        with pytest.raises(KeyboardInterrupt):
            train_once(mine)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert all(map(torch.equal, mine.parameters(), before))
    assert not copying_threads()
    train_once(mine)
    assert all(map(torch.equal, gradients(mine), gradients(plain)))


def train_once(model: nn.Module) -> None:
    model.zero_grad()
    model(batch(0)).backward()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def copying_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("tightfit far")]


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(x.relu() if x.sum() > 0 else x)


@pytest.mark.parametrize(
    ("keywords", "other"),
    [
        ({"compile": True, "exactness": "rounding"}, "compile=True"),
        ({"arena": True}, "arena=True"),
        ({"in_flight": 2}, "in_flight= of more than 1"),
        ({"planner": "chen_sqrt"}, "which moves nothing"),
        ({"methods": "forward_features"}, "methods="),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_incompatible_with_offload_are_refused(
    keywords: dict[str, Any], other: str
) -> None:
    with pytest.raises(BadInput, match=f"offload= does not go with .*{other}"):
        tightfit.fit(Deep(), "1GiB", offload="1GiB", **keywords)


def test_what_a_gpu_does_not_have_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpu = torch.device("cuda:0")
    speed = links.Link(50e9, 40e9, 1e-5)
    monkeypatch.setattr(links, "pinned_link", lambda device, *, keeps: speed)
    options = make_options("1GiB", offload="16MiB").resolved(gpu)
    far = options.far_on(gpu)
    assert far is not None  # not divided by threads of the CPU
    assert (far.store_bytes_per_s, far.load_bytes_per_s, far.latency_s) == (50e9, 40e9, 1e-5)
    offload = tightfit.Offload("1MiB", folder=tmp_path)
    with pytest.raises(BadInput, match=r"Offload\(folder=\.\.\.\) does not go with .*cuda:0"):
        make_options("1GiB", offload=offload).resolved(gpu)
    with pytest.raises(BadInput, match=r"offload= does not go with .*the device xpu yet"):
        make_options("1GiB", offload="1MiB").resolved(torch.device("xpu"))


def test_state_in_far_memory_is_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    far = tightfit.Offload("1MiB", optimizer_state=True)
    with pytest.raises(BadInput, match=r"Offload\(optimizer_state=True\) does not go with .*cuda"):
        refuse_on(torch.device("cuda"), far)


def test_a_budget_of_several_is_refused() -> None:
    with pytest.raises(BadInput, match="a Budget that several share"):
        tightfit.fit(Deep(), tightfit.Budget("1GiB"), offload="1GiB")


def test_several_graphs_are_refused_before_anything_runs(link: None) -> None:
    model = tightfit.fit(Broken(), "1MiB", offload="1MiB", cache=False)
    with pytest.raises(BadInput, match="several graphs in one call"):
        model(torch.randn(4, 8))


def test_a_plan_with_moves_is_no_plan_without_them(
    model: nn.Module, least_bytes: int, link: None, tmp_path: Path
) -> None:
    """What is kept for one link or one size of far memory answers no other question."""
    # With every alternative compared before: within the small budget some have no room for it.
    tightfit.prepare(fitted(model, 1 << 30, costs="unit"), batch(0))
    mine = fitted(model, int(0.85 * least_bytes), offload="64MiB", costs="unit")
    plan = tightfit.prepare(mine, batch(0)).plan
    assert plan is not None and any(isinstance(step, Store) for step in plan.instructions)
    own = copy.deepcopy(model)
    tightfit.fit(own, int(0.85 * least_bytes), plan=plan, cache=False, costs="unit")
    with pytest.raises(BadInput, match="names no far memory"):
        tightfit.prepare(own, batch(0))
