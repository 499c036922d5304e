"""The gradient of an output may be one expanded number, as that of a sum or a mean is."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torchgen
from torch import Tensor, nn

import tightfit
from tightfit.allocator import measure_peak
from tightfit.alternatives.dropout import gradient_in_stretches, gradient_of_kept, kept
from tightfit.execution.writing import _OF_CONTIGUOUS


class Distances(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cdist(x, x.flip(0))


LAYOUTS = (torch.contiguous_format, torch.channels_last)
LAST: dict[str, Callable[[], nn.Module]] = {
    "group norm": lambda: nn.GroupNorm(2, 8),
    "instance norm": lambda: nn.InstanceNorm2d(8, affine=True),
    "layer norm": lambda: nn.LayerNorm([6, 6]),
    "batch norm": lambda: nn.BatchNorm2d(8),
    "dropout": lambda: nn.Dropout(0.5),
    "gate": lambda: nn.GLU(1),
    "max pooling": lambda: nn.MaxPool2d(2),
    "weights scaled to a norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)),
    "distances": Distances,
}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("last", LAST)
def test_it_gives_the_gradients_of_plain_pytorch(last: str, layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), LAST[last]())
    fitted = tightfit.fit(copy.deepcopy(plain), "4MiB", costs="unit", cache=False)
    x = torch.randn(4, 4, 6, 6).contiguous(memory_format=layout)
    found = []
    for model in (plain, fitted):
        torch.manual_seed(1)
        given = x.clone().requires_grad_()
        model(given).sum().backward()
        found.append([given.grad, *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *found))


def test_operators_are_known_of_which_autograd_makes_the_gradient_contiguous() -> None:
    """PyTorch's own list of derivatives says of which: a trace of contiguous tensors does not."""
    formulas = Path(torchgen.__file__).parent / "packaged" / "autograd" / "derivatives.yaml"
    called = re.findall(
        r"(\w+_backward)\w*\((?:(?!_backward).)*?\.contiguous\(", formulas.read_text()
    )
    own = {"_weight_norm_differentiable_backward", "convolution_backward"}  # take any strides
    assert {*called} - own == {
        operator._schema.name.partition("::")[2] for operator in _OF_CONTIGUOUS
    }


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_dropout_in_stretches_makes_no_copy_of_it(layout: torch.memory_format) -> None:
    mask = (torch.rand(64, 16, 64, 64) < 0.5).contiguous(memory_format=layout)
    one, strides = torch.ones(()).expand(mask.shape), mask.stride()
    expected = torch.ops.aten.native_dropout_backward.default(one, mask, 2.0)
    marks = kept(mask, strides)
    ways = (
        lambda: gradient_in_stretches(one, mask, 2.0),
        lambda: gradient_of_kept(one, marks, strides, 2.0),
    )
    for way in ways:
        made, peak = measure_peak(way, device=torch.device("cpu"))
        assert torch.equal(made, expected) and made.stride() == expected.stride()
        assert peak.peak_bytes < 2 * made.nbytes
