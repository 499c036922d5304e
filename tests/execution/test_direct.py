"""The short way to an operator runs that operator, with every argument it may be given."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tightfit.torch_private.direct import DIRECT, direct

aten = torch.ops.aten
SQUARE = torch.linspace(-1, 1, 9).reshape(3, 3)
CUBE = torch.linspace(-1, 1, 27).reshape(3, 3, 3)
IMAGE, FILTER = torch.ones(1, 2, 5, 5), torch.ones(4, 1, 3, 3)
UNARY = [((SQUARE,), {})]
BINARY = [((SQUARE, SQUARE[0]), {}), ((SQUARE, 2), {}), ((SQUARE, 0.5), {})]
WITH_FACTOR = [*BINARY, ((SQUARE, SQUARE), {"alpha": 3})]
BACKWARD = [((SQUARE, SQUARE.softmax(1), 1, torch.float32), {})]
CALLS: dict[Any, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    aten._log_softmax.default: [((SQUARE, -1, False), {})],
    aten._log_softmax_backward_data.default: BACKWARD,
    aten._softmax.default: [((SQUARE, 0, False), {})],
    aten._softmax_backward_data.default: BACKWARD,
    aten.add.Tensor: WITH_FACTOR,
    aten.addmm.default: [
        ((SQUARE[0], SQUARE, SQUARE), {}),
        ((SQUARE,) * 3, {"beta": 2, "alpha": 0.5}),
    ],
    aten.bmm.default: [((CUBE, CUBE), {})],
    aten.convolution.default: [
        ((IMAGE, FILTER, None, [2, 2], [1, 1], [1, 1], False, [0, 0], 2), {}),
        ((IMAGE, FILTER.reshape(2, 2, 3, 3), torch.ones(2), [2], [1], [1], True, [1], 1), {}),
    ],
    aten.div.Tensor: BINARY,
    aten.embedding.default: [
        ((SQUARE, torch.tensor([2, 0])), {}),
        ((SQUARE, torch.tensor([2, 0]), 1, True, False), {}),
    ],
    aten.gelu.default: [*UNARY, ((SQUARE,), {"approximate": "tanh"})],
    aten.mm.default: [((SQUARE, SQUARE), {})],
    aten.mul.Tensor: BINARY,
    aten.native_layer_norm.default: [
        ((SQUARE, [3], None, None, 1e-5), {}),
        ((SQUARE, [3], SQUARE[0], SQUARE[1], 1e-5), {}),
    ],
    aten.permute.default: [((CUBE, [2, 0, -2]), {})],
    aten.relu.default: UNARY,
    aten.reshape.default: [((SQUARE.t(), [-1]), {}), ((SQUARE, [9]), {})],
    aten.sigmoid.default: UNARY,
    aten.silu.default: UNARY,
    aten.sub.Tensor: WITH_FACTOR,
    aten.sum.dim_IntList: [
        ((SQUARE, None), {}),
        ((SQUARE, []), {}),
        ((SQUARE, [0], True), {}),
        ((SQUARE, [-1], False), {"dtype": torch.float64}),
    ],
    aten.t.default: UNARY,
    aten.tanh.default: UNARY,
    aten.transpose.int: [((SQUARE, 0, -1), {})],
    aten.unsqueeze.default: [((SQUARE, -1), {})],
}


class Seen(TorchDispatchMode):
    """Notes the operators that run, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(f"{func}{args}{kwargs}")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("operator", DIRECT, ids=str)
def test_the_short_way_runs_the_same_operator(operator: Any) -> None:
    for args, kwargs in CALLS[operator]:
        seen = []
        for function in (operator, direct(operator)):
            with torch.no_grad(), Seen() as mode:
                result = function(*args, **kwargs)
            seen.append((mode.operators, result))
        (ops, result), (other_ops, other_result) = seen
        assert ops == other_ops
        torch.testing.assert_close(result, other_result, rtol=0, atol=0)


def test_other_operators_and_functions_stay_what_they_are() -> None:
    x = torch.tensor([0.0, 2.0])
    with Seen() as mode:
        assert direct(aten.nonzero.default)(x).tolist() == [[1]]
    assert [each.partition("(")[0] for each in mode.operators] == ["aten.nonzero.default"]
    assert direct(len) is len
