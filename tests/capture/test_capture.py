"""From a model to values and ops: what is a value, who keeps it, what may not run twice."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tightfit.alternatives.registry import with_alternatives
from tightfit.capture.capture import capture
from tightfit.capture.traced_call import TracedCall
from tightfit.graph.ir import Graph


def graph_of(model: nn.Module, *inputs) -> Graph:
    call = TracedCall(model.forward, {"model": model}, inputs, {})
    return with_alternatives(capture(call)).graph


def targets(graph: Graph) -> list[str]:
    return [op.target for op in graph.ops]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x))).sum()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
        return self.first(self.drop(x))


def test_ops_carry_the_module_that_ran_them_in_both_directions():
    graph = graph_of(Net(), torch.randn(2, 3, 8, 8))
    by_target = {op.target: op for op in graph.ops}
    assert by_target["aten.convolution"].module == "first.conv"
    assert by_target["aten.convolution_backward"].module == "first.conv"
    backward = by_target["aten.native_batch_norm_backward"]
    assert backward.module == "first.norm"
    assert graph.ops[backward.partner].target == "aten._native_batch_norm_legit_functional"


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).sum()


def test_sums_of_gradients_come_from_the_module_that_made_their_last_term():
    graph = graph_of(Residual(), torch.randn(4, 8))
    sums = [op.module for op in graph.ops if op.segment == 1 and op.target == "aten.add.Tensor"]
    assert sums == ["blocks.2.0", "blocks.1.0"]


def test_sizes_are_rounded_and_constants_counted_once():
    model = nn.Linear(5, 3)
    graph = graph_of(model, torch.randn(2, 5))
    assert graph.device.granularity_bytes == 64
    assert all(v.size_bytes % 64 == 0 for v in graph.values)
    assert graph.constants_bytes == {"parameters": 128, "buffers": 0, "inputs": 64}


def test_views_and_needless_copies_are_no_ops():
    graph = graph_of(Net(), torch.randn(2, 3, 8, 8))
    assert not {"aten.detach", "aten.clone", "aten.t", "aten.view"} & set(targets(graph))


def test_batch_norm_updates_once_and_may_run_again():
    graph = graph_of(Block(), torch.randn(2, 3, 8, 8))
    norm = next(op for op in graph.ops if "batch_norm_legit" in op.target)
    assert norm.pinned is None
    assert [a.use for a in norm.alternatives] == ["first", "again", "again"]
    written = {graph.values[v].replaces for v in norm.alternatives[0].writes}
    statistics = {v.id for v in graph.values if "running" in v.name}
    assert statistics <= written
    for again in norm.alternatives[1:]:
        assert not statistics & {*again.reads}
        assert all(graph.values[v].fate == "none" for v in again.writes)


def test_ops_that_make_gradients_or_read_updated_buffers_are_pinned():
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.register_buffer("scale", torch.ones(4))

        def forward(self, x):
            h = self.a(x) * self.scale.clone()
            self.scale.mul_(0.5)
            return h.sum()

    graph = graph_of(Counter(), torch.randn(2, 4))
    reasons = [op.pinned for op in graph.ops if op.pinned]
    assert any("gradient" in reason for reason in reasons)
    assert any("scale" in reason for reason in reasons)


def test_the_gradients_of_a_tied_weight_are_one():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False))
    model[1].weight = model[0].weight
    graph = graph_of(model, torch.tensor([1, 2, 3]))
    gradients = [v for v in graph.values if v.fate == "handed_over"]
    assert len(gradients) == 1
    total = next(op for op in graph.ops if gradients[0].id in op.alternatives[0].writes)
    assert total.alternatives[0].overwrites is not None
    assert [a.name for a in total.alternatives] == ["default", "tied_embedding.folded"]


def test_the_loss_gradient_has_a_fused_alternative_over_the_log_probabilities():
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 6)

        def forward(self, x, y):
            return F.cross_entropy(self.a(x), y)

    graph = graph_of(Classifier(), torch.randn(8, 4), torch.zeros(8, dtype=torch.long))
    op = next(op for op in graph.ops if "log_softmax_backward" in op.target)
    assert {"cross_entropy.fused", "cross_entropy.fused_over_log_probabilities"} <= {
        a.name for a in op.alternatives
    }
    assert not next(op for op in graph.ops if op.target == "aten.nll_loss_backward").required


def test_random_ops_say_how_much_state_they_keep():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    graph = graph_of(model, torch.randn(2, 4))
    assert next(op.random_state_bytes for op in graph.ops if "dropout" in op.target) > 0
    model.eval()
    assert "aten.native_dropout" not in targets(graph_of(model, torch.randn(2, 4)))


def test_capture_runs_nothing_and_changes_nothing():
    model = Net()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    generator = torch.get_rng_state()
    x = torch.randn(2, 3, 8, 8)
    generator = torch.get_rng_state()
    graph_of(model, x)
    assert torch.equal(generator, torch.get_rng_state())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_each_gradient_of_a_grouped_convolution_costs_what_its_forward_costs() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 3, stride=2, groups=8, bias=False))
    graph = graph_of(model, torch.randn(2, 4, 9, 9))
    backward = [op for op in graph.ops if op.target.startswith("aten.convolution_backward")]
    assert [op.module for op in backward] == ["1", "0"]
    assert backward[0].flops == 2 * (2 * 8 * 4 * 4 * 3 * 3 * 2)
    assert backward[1].flops == 2 * 2 * 8 * 9 * 9 * 4
