"""What computes with arrays between graphs: detectors that match in SciPy, lengths."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tightfit.studies.comparison import Comparison
from tightfit.zoo import Example

linear_sum_assignment = pytest.importorskip("scipy.optimize").linear_sum_assignment


class Detector(nn.Module):
    """As a set of queries is trained: each target has the query that fits it best."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64))
        self.boxes, self.classes = nn.Linear(64, 4), nn.Linear(64, 5)

    def forward(self, x, boxes, classes):
        h = self.body(x)
        found, scores = self.boxes(h).sigmoid(), self.classes(h)
        with torch.no_grad():
            costs = torch.cdist(found, boxes, p=1).cpu()
        first, second = linear_sum_assignment(costs[0].numpy()), linear_sum_assignment(costs[1])
        matched = [torch.from_numpy(first[0]), torch.as_tensor(second[0])]
        targets = [torch.from_numpy(first[1]), torch.as_tensor(second[1])]
        loss = scores.logsumexp(-1).mean()
        for sample, (query, target) in enumerate(zip(matched, targets, strict=True)):
            loss = loss + (found[sample, query] - boxes[sample, target]).abs().mean()
            loss = loss - scores[sample, query].gather(1, classes[sample, target, None]).mean()
        return loss


def test_a_detector_is_planned_around_what_matches() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(2, 20, 16), torch.rand(2, 6, 4), torch.randint(0, 5, (2, 6))
    comparison = Comparison(Example(Detector(), None, inputs, None), costs="unit", limits=(1, 0.01))
    for budget in (comparison.budget_of(1.0), comparison.least_bytes()):
        proof = comparison.at(budget, rounds=0)
        assert proof.succeeded
        # less where the backward lets go of what the caller does not hold: a plan counts it
        assert -0.02 <= proof.prediction_error <= 0.01


class Packing(nn.Module):
    """Hands lengths to a recurrent layer as an array, as speech models do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.rnn = nn.GRU(16, 16, batch_first=True)

    def forward(self, x, lengths):
        lengths = lengths.cpu().numpy()
        packed = nn.utils.rnn.pack_padded_sequence(self.body(x), lengths, batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0].sum()


def test_lengths_as_an_array_are_the_lengths() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(3, 7, 8), torch.tensor([7, 5, 2])
    comparison = Comparison(Example(Packing(), None, inputs, None), costs="unit", limits=(1, 0.01))
    assert comparison.at(comparison.least_bytes(), rounds=0).succeeded
