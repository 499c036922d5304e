"""Each feature of a model is bitwise right, where the table says, or refused with the way out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tightfit
from api.test_bitwise import assert_equal, train_step
from support.features import REFUSED, SUPPORTED, Refused, trained
from support.models import CASES, OUTSIDE, PARTLY, PLANNED, SEVERAL, Case
from support.releases import why_not_here
from tightfit.errors import BadInput


@pytest.mark.parametrize("case", [*CASES, *SUPPORTED], ids=lambda case: case.name)
@pytest.mark.filterwarnings("ignore:hooks on module")
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_supported(case: Case) -> None:
    torch.manual_seed(0)
    plain, inputs = case.model(), case.inputs()
    torch.manual_seed(0)
    model, own_inputs = case.model(), case.inputs()
    fitted = tightfit.fit(model, "1GiB", costs="unit")
    for step in range(3):
        reference = train_step(case, plain, inputs, step)
        assert_equal(train_step(case, fitted, own_inputs, step), reference)
    assert _where(fitted) == case.where_here


def _where(fitted: nn.Module) -> str:
    """Return where the steps of a model have run."""
    try:
        report = tightfit.report(fitted)
    except BadInput as error:
        assert "ran outside of every plan" in str(error)
        return OUTSIDE
    if not report.outside:
        return PLANNED
    breaks = [place.startswith("the code where Dynamo ends a graph") for place in report.outside]
    return SEVERAL if all(breaks) else PARTLY


@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: refused.name)
@pytest.mark.filterwarnings("ignore:hooks on module")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
def test_refused(refused: Refused) -> None:
    torch.manual_seed(0)
    with pytest.raises(refused.error, match=f"(?s){refused.message}") as error:
        refused.run(lambda model: tightfit.fit(model, "1GiB", costs="unit"))
    assert str(error.value).count("with tightfit.online(budget=...)") == 1


@pytest.mark.parametrize("refused", [r for r in REFUSED if r.instead], ids=lambda r: r.name)
def test_the_advised_way_out_trains(refused: Refused) -> None:
    """What the message advises trains, with the bits of plain PyTorch."""
    if refused.needs is not None and not refused.needs.is_available:
        pytest.skip(why_not_here(refused.needs))
    expected = trained(refused.instead)
    found = trained(refused.instead, lambda model: tightfit.fit(model, "1GiB", costs="unit"))
    assert_equal(found, expected)
