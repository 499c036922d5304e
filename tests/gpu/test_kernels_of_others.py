"""Other kernels of cuDNN and for attention keep what they promise on the device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tightfit
from tightfit.alternatives.registry import with_alternatives
from tightfit.capture.capture import capture
from tightfit.capture.traced_call import TracedCall
from tightfit.pricing.exactness import without_inexact
from tightfit.progress import SILENT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Both(nn.Module):
    """Convolutions, their pixels as tokens, attention among them."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 64, 3, padding=1)
        self.three = nn.Linear(64, 192)

    def forward(self, images):
        x = F.max_pool2d(F.relu(self.patches(images)), 2).flatten(2).transpose(1, 2)
        heads = (t.unflatten(-1, (2, 32)).transpose(1, 2) for t in self.three(x).chunk(3, -1))
        return F.scaled_dot_product_attention(*heads).square().mean()


@pytest.fixture
def precise() -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def names(step) -> set[str]:
    return {way.name for op in step.graph.ops for way in op.alternatives}


@pytest.mark.usefixtures("precise")
def test_other_kernels_are_compared_and_steps_with_them_are_near_plain_ones() -> None:
    torch.manual_seed(0)
    model, images = Both().cuda(), torch.randn(4, 3, 32, 32, device="cuda")
    step = capture(TracedCall(model, {"model": model}, (images,), {}))
    kept = names(without_inexact(with_alternatives(step, "rounding"), SILENT))
    assert kept >= {"convolution.cudnn_native", "attention.formula", "max_pool.from_offsets"}
    others = {"attention.flash", "attention.efficient", "attention.cudnn"}
    assert not kept & others  # the kernel that runs is the only one for float32
    half = Both().cuda().bfloat16()
    step = capture(TracedCall(half, {"model": half}, (images.bfloat16(),), {}))
    assert names(without_inexact(with_alternatives(step, "rounding"), SILENT)) & others
    model(images).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    tightfit.fit(model, "1GiB", exactness="rounding", cache=False)
    model(images).backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-5)
