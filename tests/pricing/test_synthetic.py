"""Arguments that operators are measured with."""

from __future__ import annotations

from operator import getitem

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from tightfit.capture.captured import Call
from tightfit.pricing.synthetic import synthetic_arguments

aten = torch.ops.aten


def test_seeds_of_efficient_attention_lie_on_the_cpu() -> None:
    """Its backward reads them there on every device; fakes of a GPU say that they lie on it."""
    graph = fx.Graph()
    made = graph.call_function(aten._scaled_dot_product_efficient_attention.default, ())
    picked = [graph.call_function(getitem, (made, index)) for index in range(4)]
    with FakeTensorMode():
        picked[0].meta["val"] = torch.empty(2, 3)
        picked[1].meta["val"] = torch.empty(2)
        for node in picked[2:]:
            node.meta["val"] = torch.empty((), dtype=torch.long, device="cuda")
    reads = aten._scaled_dot_product_efficient_attention_backward.default
    args, _ = synthetic_arguments(
        fx.GraphModule({}, fx.Graph()), Call(reads, (*picked,), {}, (), True)
    )
    assert [x.shape for x in args] == [(2, 3), (2,), (), ()]
    assert {x.device.type for x in args} == {"cpu"}
