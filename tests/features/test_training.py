"""Every way of training gives the bits of plain PyTorch, inside the budget."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import tightfit
from support.training import WAYS, Net, batches
from tightfit.allocator.tally import free_for
from tightfit.execution.attach import attached

pytestmark = pytest.mark.usefixtures("one_thread")

SHARE = 0.9
"""Of the peak that keeping everything needs: something must be computed again."""
MORE_BYTES = {
    "a closure called several times a step (LBFGS)": 8192,
    "several forwards before a backward": 45056,
    "autocast with GradScaler": 9216,
    "bfloat16 weights": 9216,
    "training in eval mode (frozen BatchNorm)": 9216,
    "several backwards through a forward of several graphs": 57344,
    "tasks weighed by their gradients (GradNorm) in a model of several graphs": 57344,
    "a gradient penalty (`create_graph`) through a model of several graphs": 116736,
}
"""LBFGS holds flat directions and gradients; every call that is open keeps something; some
processors' kernels work with a column for each place of an image. Graphs of one operator each
keep what they take and give; a derivative that is differentiated takes what plain PyTorch takes."""


@pytest.fixture(scope="module")
def budget_bytes() -> int:
    """A budget too small to keep every activation, with room for an optimizer's state."""
    model = Net()
    tightfit.fit(model, "1GiB", optimizer=torch.optim.Adam(model.parameters()))
    ((x, _),) = batches(1)
    report = tightfit.prepare(model, x)
    kept = report.planned_peak_bytes - report.constant_bytes
    return report.constant_bytes + round(SHARE * kept)


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
def test_same_bits_inside_the_budget(name: str, budget_bytes: int) -> None:
    budget_bytes += MORE_BYTES.get(name, 0)
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    fitted: list[nn.Module] = []

    def fit(each: nn.Module, optimizer) -> nn.Module:
        fitted.append(each)
        return tightfit.fit(each, budget_bytes, optimizer=optimizer)

    reference = WAYS[name](plain, lambda each, optimizer: each)
    result = WAYS[name](model, fit)
    state = [*plain.state_dict().values()], [*model.state_dict().values()]
    for a, b in zip([*reference, *state[0]], [*result, *state[1]], strict=True):
        assert torch.equal(a, b)
    for each in fitted:
        # a whole step that exceeds it raises at the next call of the model
        guard = attached(each).guard
        assert guard.steps
        assert all(s.peak_bytes <= budget_bytes for s in guard.steps)


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
def test_same_bits_where_saved_tensors_are_freed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the limit had found no room: every call that may is run once more in its backward."""
    freed_bytes: list[int] = []
    backward = torch.autograd.backward

    def after_freeing(*args: Any, **kwargs: Any) -> None:
        freed_bytes.append(free_for(1 << 40, torch.device("cpu")))
        backward(*args, **kwargs)

    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    reference = WAYS[name](plain, lambda each, optimizer: each)
    monkeypatch.setattr(torch.autograd, "backward", after_freeing)
    fit = lambda each, optimizer: tightfit.fit(each, "1GiB", optimizer=optimizer, costs="unit")  # noqa: E731
    result = WAYS[name](model, fit)
    if not any(each in name for each in ("several graphs", "functional_call")):
        assert max(freed_bytes) > 0
    state = [*plain.state_dict().values()], [*model.state_dict().values()]
    for a, b in zip([*reference, *state[0]], [*result, *state[1]], strict=True):
        assert torch.equal(a, b)
