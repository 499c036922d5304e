"""What only a GPU can show: ``pytest -m gpu``, also part of ``make gpu-proof``."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import tightfit
from tightfit.allocator import meter_for
from tightfit.execution.attach import attached

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("deterministic"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WIDTH, TOKENS = 64, 128


class Convolutions(nn.Module):
    """cuDNN's convolutions and BatchNorm, in place ReLU, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv2d(3 if i == 0 else 32, 32, 3, padding=1, bias=False),
                    nn.BatchNorm2d(32),
                    nn.ReLU(inplace=True),
                    nn.Dropout(0.1),
                )
                for i in range(4)
            )
        )
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


class Attention(nn.Module):
    """Blocks of attention by one kind of kernel."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(3))
        self.dropout = dropout

    def forward(self, x):
        for projection in self.projections:
            heads = projection(x).unflatten(-1, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(*heads, dropout_p=self.dropout, is_causal=True)
            x = x + y.transpose(1, 2).flatten(2)
        return x


def image() -> torch.Tensor:
    return torch.randn(16, 3, 32, 32, device="cuda")


def tokens(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(4, TOKENS, WIDTH, device="cuda", dtype=dtype)


def train(
    model: nn.Module, x: torch.Tensor, optimizer: Any, context: Callable[[], Any]
) -> list[torch.Tensor]:
    """Take four steps; what is around a forward ends with it, as an autocast should."""
    found = []
    for step in range(4):
        torch.manual_seed(step)
        with context():
            output = model(x)
        loss = output.float().square().mean()
        loss.backward()
        found.append(loss.detach().clone())
        found += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return found + [t.clone() for t in model.state_dict().values()]


def same_bits_inside_the_budget(
    model: nn.Module, x: torch.Tensor, context: Callable[[], Any] = contextlib.nullcontext
) -> None:
    """Train plainly and at 0.7 of the plan that keeps everything."""
    plain, model = model.cuda(), copy.deepcopy(model).cuda()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.01, momentum=0.9)
    expected = train(plain, x, plain_optimizer, context)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    tightfit.fit(model, "8GiB", optimizer=optimizer, cache=False)
    if context is contextlib.nullcontext:
        report = tightfit.prepare(model, x)
        kept = report.planned_peak_bytes - report.constant_bytes
        least = attached(model).smallest_budget((x,), {}).found_bytes
        attached(model).change_budget(max(least, report.constant_bytes + round(0.7 * kept)))
    found = train(model, x, optimizer, context)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    session = attached(model)
    session.close_step()
    assert all(s.peak_bytes <= session.options.budget_bytes for s in session.guard.steps)
    planned = tightfit.report(model).planned_peak_bytes
    assert session.guard.steps[-1].program_bytes == pytest.approx(planned, rel=0.02)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_cudnn_convolutions_and_batch_norm(layout: torch.memory_format) -> None:
    model = Convolutions().to(memory_format=layout)
    same_bits_inside_the_budget(model, image().to(memory_format=layout))


def test_frozen_batch_norm() -> None:
    """cuDNN computes that, too."""
    same_bits_inside_the_budget(Convolutions().eval(), image())


class Cells(nn.Module):
    """Recurrent cells, fused kernels on a GPU, and a recurrent module by cuDNN."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.gru, self.lstm = nn.GRUCell(WIDTH, WIDTH), nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, x):
        hidden = memory = x.new_zeros(len(x), WIDTH)
        for step in self.recurrent(x)[0].unbind(1)[:4]:
            hidden, memory = self.lstm(self.gru(step, hidden), (hidden, memory))
        return hidden


def test_recurrent_modules() -> None:
    same_bits_inside_the_budget(Cells(), tokens())


def test_the_first_step_finds_the_libraries_workspaces_taken() -> None:
    """Forward and backward, on any stream, find what cuBLAS takes at its first use."""
    model = tightfit.fit(nn.Linear(WIDTH, WIDTH).cuda(), "8GiB", costs="unit", cache=False)
    with torch.cuda.stream(torch.cuda.Stream()):
        x = torch.randn(8, WIDTH, device="cuda")
        tightfit.prepare(model, x)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        model(x).sum().backward()
        model.zero_grad()
        assert torch.cuda.memory_allocated() - before < 1 << 20


def test_batch_norm_runs_by_cudnn() -> None:
    """The traced step calls what eager calls: the operators that keep cuDNN's reserve."""
    model = tightfit.fit(Convolutions().cuda(), "8GiB", costs="unit", cache=False)
    tightfit.prepare(model, image())
    targets = {op.target for op in attached(model).last.graph.ops}
    assert any("_batch_norm_with_update" in target for target in targets)
    assert not any("native_batch_norm" in target for target in targets)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("kind", ["MATH", "EFFICIENT_ATTENTION", "FLASH_ATTENTION"])
def test_kinds_of_attention(kind: str, dropout: float) -> None:
    dtype = torch.float16 if kind == "FLASH_ATTENTION" else torch.float32
    model = Attention(dropout).to(dtype)
    backend = getattr(SDPBackend, kind)
    same_bits_inside_the_budget(model, tokens(dtype), lambda: sdpa_kernel(backend))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(dtype: torch.dtype) -> None:
    same_bits_inside_the_budget(Convolutions(), image(), lambda: torch.autocast("cuda", dtype))


def test_sizes_are_those_of_the_allocator() -> None:
    """The meter counts what is asked for; graphs round it up to 512 bytes, as blocks are."""
    meter = meter_for("cuda")
    before = meter.live_bytes()
    kept = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in (1, 512, 513, 5000)]
    assert meter.live_bytes() - before == 1 + 512 + 513 + 5000
    del kept
    meter.reset_peak()
    assert meter.peak_bytes() == meter.live_bytes()
    model = tightfit.fit(nn.Linear(3, 5).cuda(), "1GiB", costs="unit", cache=False)
    tightfit.prepare(model, torch.randn(2, 3, device="cuda"))
    assert all(v.size_bytes % 512 == 0 for v in attached(model).last.graph.values)


def test_a_step_on_a_stream_of_its_own() -> None:
    """Forward and backward run on the caller's stream; nothing is freed too early."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        same_bits_inside_the_budget(Convolutions(), image())
    torch.cuda.current_stream().wait_stream(stream)


def test_random_numbers_are_drawn_again_on_the_device() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Dropout(0.5), nn.GELU(), nn.Linear(256, 8))
    same_bits_inside_the_budget(model, torch.randn(512, 256, device="cuda"))


def test_the_device_is_the_budget() -> None:
    model = tightfit.fit(Convolutions().cuda(), "device", reserve="1GiB", costs="unit")
    total = torch.cuda.get_device_properties(0).total_memory
    report = tightfit.prepare(model, image())
    assert 0 < report.budget_bytes <= total - (1 << 30)
    model(image()).sum().backward()
    assert tightfit.report(model).budget_bytes == report.budget_bytes


def test_a_fitted_step_is_recorded_as_a_cuda_graph() -> None:
    """As docs/cuda-graph.md says: replayed it gives the gradients of a call."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(6)], nn.GELU()).cuda()
    tightfit.fit(model, "1GiB", cache=False)
    x = torch.randn(8192, 1024, device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            loss = model(x).square().mean()
        loss.backward()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # whose workspaces are constants of the plan
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            report = tightfit.prepare(model, x)
        kept = report.planned_peak_bytes - report.constant_bytes
        attached(model).change_budget(report.constant_bytes + round(0.8 * kept))
        for _ in range(12):
            model.zero_grad()
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    model.zero_grad()
    with torch.cuda.graph(graph, stream=side):  # whose workspaces are there
        step()
    new = torch.randn(8192, 1024, device="cuda")
    x.copy_(new)
    for p in model.parameters():
        p.grad.zero_()
    graph.replay()
    replayed = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    step()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), replayed, strict=True))
