"""Triton kernels and their twins in PyTorch: the same bits, for sums the same up to rounding.

They run on a GPU, or anywhere under Triton's interpreter:

    TRITON_INTERPRET=1 pytest tests/contract/test_kernels.py
"""

from __future__ import annotations

import math
import os

import pytest
import torch

from tightfit.alternatives.bits import bit_bytes
from tightfit.alternatives.dropout import gradient_of_kept, kept
from tightfit.alternatives.max_pool import Windows, gradient_from_offsets, offsets
from tightfit.alternatives.norms.from_output import gradients_of_layer_norm
from tightfit.alternatives.relu import pass_marked, passed

pytest.importorskip("triton", reason="Triton is not installed: it comes with PyTorch for CUDA")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1", allow_module_level=True)

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
SPECIAL = (0.0, -0.0, 1.0, -1.0, math.nan, math.inf, -math.inf, 1e-40)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(0)
    x = torch.randn(shape)
    x.flatten()[: len(SPECIAL)] = torch.tensor(SPECIAL)[: x.numel()]
    return x.to(dtype)


def bits_of(x: torch.Tensor) -> torch.Tensor:
    return x.where(~x.isnan(), math.nan).cpu().contiguous().view(torch.uint8)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter's inf * 0
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 13, 4099])
def test_bits_and_gradients_where_they_are_set(count, dtype) -> None:
    from tightfit.alternatives.kernels import bits

    output, gradient = drawn(count, dtype=dtype).relu(), drawn(count, dtype=dtype).flip(0)
    mask = torch.rand(count) < 0.7
    for pack, twin, given in ((bits.pack_passed, passed, output), (bits.pack_kept, kept, mask)):
        made = torch.empty(bit_bytes(count), dtype=torch.uint8, device=DEVICE)
        pack(given.to(DEVICE), made)
        expected = twin(given, (1,))
        assert torch.equal(made.cpu(), expected)
        for scale in (None, 1 / 0.7):
            out = gradient.to(DEVICE).clone()
            bits.keep_marked(out, made, out, scale)
            other = pass_marked(gradient, expected, (1,))
            if scale is not None:
                other = gradient_of_kept(gradient, expected, (1,), scale)
            if dtype is torch.float32 or scale is None:
                assert torch.equal(bits_of(out), bits_of(other))
            else:
                torch.testing.assert_close(out.cpu(), other, equal_nan=True)


POOLS = (
    ((2, 3, 9, 7), (3, 3), (2, 2), (1, 1), (1, 1), False),
    ((2, 3, 9, 8), (3, 2), (1, 2), (1, 0), (2, 2), False),
    ((2, 3, 10, 11), (3, 3), (2, 2), (0, 0), (1, 1), True),
    ((2, 2, 6, 7, 8), (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1), False),
)


@pytest.mark.parametrize(("shape", "kernel", "strides", "padding", "dilation", "ceil"), POOLS)
def test_offsets_of_maxima_and_the_gradient_of_the_image(
    shape, kernel, strides, padding, dilation, ceil
) -> None:
    from tightfit.alternatives.kernels import max_pool

    flat = len(kernel) == 2
    operators = torch.ops.aten
    pool = operators.max_pool2d_with_indices if flat else operators.max_pool3d_with_indices
    how = (kernel, strides, padding, dilation, ceil)
    maxima, places = pool(torch.randn(shape), *how)
    extents = tuple((k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True))
    windows = Windows(shape[2:], extents, strides, padding)
    expected = offsets(places, windows)
    where = (shape[2:], extents, strides, padding)
    made = max_pool.offsets_of(places.to(DEVICE), *where)
    assert torch.equal(made.cpu(), expected)
    gradient = torch.randn(maxima.shape)
    image = torch.empty(shape)
    twin = gradient_from_offsets(gradient, expected, windows, image.stride(), *how)
    out = torch.empty(shape, device=DEVICE)
    made = max_pool.gradient_of_image(gradient.to(DEVICE), made, *where, out=out)
    assert torch.equal(made.cpu(), twin)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (37, 100), (64, 128)])
def test_gradients_of_a_layer_norm_from_its_output(rows, width, bias) -> None:
    from tightfit.alternatives.kernels import layer_norm

    torch.manual_seed(0)
    gradient, output, weight = torch.randn(rows, width), torch.randn(rows, width), torch.rand(width)
    weight, deviation = weight + 0.5, torch.rand(rows)
    shift = torch.randn(width) if bias else None
    twin = gradients_of_layer_norm(
        gradient, output, [width], deviation[:, None], weight, shift, [True, True, bias]
    )
    given = (gradient, output, deviation, weight, shift)
    made = layer_norm.gradients_of_rows(*(t if t is None else t.to(DEVICE) for t in given))
    for ours, expected in zip(made, twin if bias else twin[:2], strict=False):
        torch.testing.assert_close(ours.cpu(), expected, rtol=1e-5, atol=1e-5)
