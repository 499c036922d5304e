"""Each feature of a model is either bitwise right or refused with the way out."""

from __future__ import annotations

import copy

import pytest
import torch

import tightfit
from api.test_bitwise import assert_equal, train_step
from support.features import REFUSED, SUPPORTED, Refused
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


@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: refused.name)
@pytest.mark.filterwarnings("ignore:hooks on module")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
def test_refused(refused: Refused) -> None:
    torch.manual_seed(0)
    with pytest.raises(refused.error, match=f"(?s){refused.message}") as error:
        refused.run(lambda model: tightfit.fit(model, "1GiB", costs="unit"))
    assert str(error.value).count("with tightfit.online(budget=...)") == 1
