"""Loops in an arena end with the bits of plain PyTorch, whatever they do, and nothing leaks."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tightfit
from support.memory import in_a_fresh_process
from tightfit.allocator import CpuMeter, resident_bytes
from tightfit.allocator.replay import poisoned
from tightfit.errors import BadInput

MIB = 1 << 20


def small_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(16 * 49, 10),
    )


class Reader(nn.Module):
    """Reads texts of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.recurrent = nn.LSTM(32, 32, batch_first=True)
        self.head = nn.Linear(32, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(self.embedding(tokens))[0])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def images(step: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(4, 3, 16, 16), torch.randint(0, 10, (4,))


def texts(length: int) -> tuple[torch.Tensor, ...]:
    tokens = torch.randint(0, 50, (4, length + 1))
    return tokens[:, :-1], tokens[:, 1:].reshape(-1)


def trained(
    make: Callable[[], nn.Module],
    batch: Callable[[int], tuple[torch.Tensor, ...]],
    *,
    arena: tightfit.Arena | None,
    steps: int = 10,
    shaped: bool = False,
    also: Callable[[int, torch.Tensor], None] = lambda step, output: None,
) -> list[torch.Tensor]:
    """Train and return losses and parameters."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.Adam(model.parameters())
    losses: list[torch.Tensor] = []
    for step in range(steps):
        x, target = batch(step)
        if arena is not None and shaped:
            arena.step(x.shape)
        output = model(x)
        loss = F.cross_entropy(output.reshape(len(target), -1), target)
        loss.backward()
        also(step, output)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        del output, loss
        if arena is not None and not shaped:
            arena.step()
    return [*losses, *model.parameters()]


def assert_same(ours: list[torch.Tensor], plain: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


LOOPS = {
    "convolutions": (small_net, images),
    "recurrent": (Reader, lambda step: texts(12)),
    "attention": (Attention, lambda step: (torch.randn(4, 8, 32), torch.randint(0, 32, (32,)))),
    "growing": (Reader, lambda step: texts(5 + step)),
    "any length": (Reader, lambda step: texts(3 + step * 7 % 11)),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_bits_are_those_of_plain_pytorch_and_no_memory_is_read_that_is_not_ones_own(
    loop: str,
) -> None:
    make, batch = LOOPS[loop]
    plain = trained(make, batch, arena=None)
    with poisoned(), tightfit.arena() as arena:
        assert_same(trained(make, batch, arena=arena), plain)
    report = arena.report
    assert report.steps == 10 and report.hits > 0
    assert report.requests == report.hits + report.outside + report.fallbacks
    assert report.lower_bound_bytes == report.height_bytes > 0
    if batch(0)[0].shape == batch(1)[0].shape:
        assert report.exact_steps >= 6
        assert report.layouts <= 3


def test_each_shape_has_a_layout_in_one_arena() -> None:
    lengths = [4, 9, 4, 9, 6, 4, 9, 6] * 3

    def batch(step: int) -> tuple[torch.Tensor, ...]:
        return texts(lengths[step])

    plain = trained(Reader, batch, arena=None, steps=len(lengths))
    with poisoned(), tightfit.arena() as arena:
        ours = trained(Reader, batch, arena=arena, steps=len(lengths), shaped=True)
    assert_same(ours, plain)
    assert arena.report.exact_steps >= 12


@pytest.mark.parametrize(("shapes", "exact"), [("aab", 0), ("aaabbb", 3), ("aaabcbc", 3)])
def test_once_steps_went_as_planned_those_of_another_shape_are_recorded_once(
    shapes: str, exact: int
) -> None:
    sizes = {"a": 1000, "b": 5000, "c": 3000}
    with tightfit.arena() as arena:
        for shape in shapes:
            arena.step(shape)
            x = torch.ones(sizes[shape])
            y = x + 1
            del x, y
        arena.end_step()
    assert (arena.report.exact_steps, arena.report.fallbacks) == (exact, 0)


def test_kept_outputs_late_frees_and_other_threads_stay_right() -> None:
    """Outputs are kept at random, and a thread allocates and frees all the time."""
    stop = threading.Event()

    def busy() -> None:
        own = random.Random(1)
        kept: list[torch.Tensor] = []
        while not stop.is_set():
            kept.append(torch.full((own.randrange(1, 5000),), 3.0))
            if len(kept) > 20:
                assert bool((kept.pop(own.randrange(20)) == 3.0).all())

    def loop(arena: tightfit.Arena | None) -> list[torch.Tensor]:
        draw = random.Random(0)
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []

        def also(step: int, output: torch.Tensor) -> None:
            if draw.random() < 0.5:
                kept.append((output, output.detach().double()))
            if len(kept) > 2:
                kept.pop(draw.randrange(len(kept)))
            assert all(bool((a.double() == b).all()) for a, b in kept)

        return trained(small_net, images, arena=arena, steps=20, also=also)

    plain = loop(None)
    thread = threading.Thread(target=busy)
    thread.start()
    try:
        with poisoned(), tightfit.arena() as arena:
            assert_same(loop(arena), plain)
    finally:
        stop.set()
        thread.join()
    assert arena.report.hits > 0


def test_requests_of_interrupted_parts_belong_to_no_step() -> None:
    """Something random between two requests of the step does not disturb its plan."""
    draw = random.Random(0)

    def disturb(arena: tightfit.Arena | None) -> Callable[[int, torch.Tensor], None]:
        def also(step: int, output: torch.Tensor) -> None:
            if arena is not None:
                with arena.interrupted():
                    for _ in range(draw.randrange(9)):
                        torch.empty(draw.randrange(1, 999))

        return also

    plain = trained(small_net, images, arena=None)
    with poisoned(), tightfit.arena() as arena:
        assert_same(trained(small_net, images, arena=arena, also=disturb(arena)), plain)
    assert arena.report.exact_steps >= 6


def test_an_exception_ends_the_arena_and_its_tensors_live_on() -> None:
    kept: list[torch.Tensor] = []
    with pytest.raises(KeyError), tightfit.arena() as arena:
        for step in range(6):
            x = torch.full((1000,), float(step))
            y = x + 1
            if step == 5:
                kept.append(y)
                raise KeyError
            del x, y
            arena.step()
    assert bool((kept[0] == 6.0).all())
    with tightfit.arena() as again:
        again.step()


def test_nothing_leaks_and_pages_are_given_back() -> None:
    meter = CpuMeter()
    gc.collect()
    before, resident = meter.live_bytes(), resident_bytes()
    for _ in range(5):
        with tightfit.arena() as arena:
            for _ in range(20):
                x = torch.ones(4 * MIB)
                y = x + 1
                del x, y
                arena.step()
        assert 32 * MIB <= arena.report.height_bytes < 33 * MIB
    assert meter.live_bytes() == before
    assert resident_bytes() < resident + 32 * MIB


def test_a_loop_that_turns_into_another_is_laid_out_anew_and_not_held_twice() -> None:
    in_a_fresh_process(_turns_into_another)


def _turns_into_another() -> None:
    before = resident_bytes()
    held: list[int] = []
    with tightfit.arena() as arena:
        for step in range(14):
            x = torch.ones((8 if step < 6 else 12) * MIB)  # four bytes each
            y = x + 1
            del x
            for _ in range(4 if step >= 6 else 0):
                y += y * 2
            held.append(resident_bytes() - before)
            del y
            arena.step()
    report = arena.report
    assert report.exact_steps >= 6 and report.layouts == 2
    assert 96 * MIB <= report.height_bytes < 97 * MIB
    assert held[6] < (48 + 16) * MIB  # astray: pages are given back as they are freed
    assert held[7] < (48 + 16) * MIB  # recorded only: the pages of the old layout are given back
    assert held[13] < report.height_bytes + 16 * MIB


def test_memory_of_a_gpu_is_said_to_have_no_places(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = iter([5, 5, 9, 12])
    monkeypatch.setattr("tightfit.arenas.arena.cuda_requests", lambda: next(counts))
    with tightfit.arena() as arena:
        arena.step()
        assert capsys.readouterr().err == ""
        arena.step()
        assert "request memory of a GPU" in capsys.readouterr().err
        arena.step()
    assert capsys.readouterr().err == ""


def test_wrong_use_is_said() -> None:
    arena = tightfit.arena()
    with pytest.raises(BadInput, match="inside its 'with' block"):
        arena.step()
    with arena:
        with pytest.raises(BadInput, match="in use"), arena:
            pass
        errors: list[BaseException] = []

        def elsewhere() -> None:
            try:
                arena.step()
            except BadInput as error:
                errors.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert "in the thread that entered it" in str(errors[0])
        with pytest.raises(BadInput, match="cannot be nested"), tightfit.arena():
            pass


def test_a_fitted_model_takes_its_steps_in_an_arena() -> None:
    def train(arena: bool | None) -> tuple[nn.Module, list[torch.Tensor]]:
        torch.manual_seed(0)
        model = small_net()
        optimizer = torch.optim.Adam(model.parameters())
        if arena is not None:
            tightfit.fit(model, "64MiB", optimizer=optimizer, costs="unit", arena=arena)
        for step in range(10):
            x, target = images(step)
            F.cross_entropy(model(x), target).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, list(model.parameters())

    _, plain = train(None)
    with poisoned():
        model, ours = train(True)
    assert_same(ours, plain)
    report = tightfit.report(model).arena
    assert report is not None and report.exact_steps >= 3 and report.height_bytes > 0
    tightfit.unfit(model)
    with tightfit.arena() as again:
        again.step()
