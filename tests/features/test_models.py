"""Each feature of a model is either bitwise right or refused with the way out."""

from __future__ import annotations

import copy

import pytest
import torch

import tightfit
from api.test_bitwise import assert_equal, train_step
from support.features import REFUSED, SUPPORTED, Refused, trained
from support.fronts import THROUGH_DYNAMO, of_dynamo
from support.models import Case


@pytest.mark.parametrize("case", SUPPORTED, ids=lambda case: case.name)
@pytest.mark.filterwarnings("ignore:hooks on module")
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
def test_supported(case: Case) -> None:
    torch.manual_seed(0)
    plain = case.model()
    torch.manual_seed(0)
    fitted = tightfit.fit(case.model(), "1GiB", costs="unit")
    inputs = case.inputs()
    own_inputs = copy.deepcopy(inputs)
    for step in range(2):
        reference = train_step(case, plain, inputs, step)
        assert_equal(train_step(case, fitted, own_inputs, step), reference)


HERE = [
    refused
    for refused in REFUSED  # on one rank a DTensor can only be pretended: see `support.sharded`
    if not THROUGH_DYNAMO or not (refused.through_dynamo or refused.name == "DTensor")
]


@of_dynamo
@pytest.mark.parametrize(
    "refused", [r for r in REFUSED if r.through_dynamo], ids=lambda refused: refused.name
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
def test_what_the_tracer_refuses_is_right(refused: Refused) -> None:
    expected = trained(refused)
    found = trained(refused, lambda model: tightfit.fit(model, "1GiB", costs="unit"))
    assert_equal(found, expected)


@pytest.mark.parametrize("refused", HERE, ids=lambda refused: refused.name)
@pytest.mark.filterwarnings("ignore:hooks on module")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
def test_refused(refused: Refused) -> None:
    torch.manual_seed(0)
    with pytest.raises(refused.error, match=f"(?s){refused.message}") as error:
        refused.run(lambda model: tightfit.fit(model, "1GiB", costs="unit"))
    assert str(error.value).count("with tightfit.online(budget=...)") == 1
