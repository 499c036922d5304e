"""Further ways of a priced step: what was known stays, and only these run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tightfit.alternatives.registry import with_alternatives
from tightfit.capture.capture import capture
from tightfit.capture.traced_call import TracedCall
from tightfit.graph.ir import Exactness
from tightfit.pricing import records
from tightfit.pricing.further import further_costs
from tightfit.pricing.keys import name_of
from tightfit.pricing.price import measured_costs
from tightfit.progress import SILENT


class Images(nn.Module):
    """A pooling with masks, and a norm that may give its gradients from its output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.max_pool2d(F.silu(self.norm(self.first(x))).relu(), 2).square().mean()


def test_only_further_ways_run_and_all_else_keeps_its_price(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TIGHTFIT_CACHE_DIR", str(tmp_path))
    plain = capture(TracedCall(model := Images(), {"model": model}, (torch.ones(4, 3, 8, 8),), {}))
    priced = measured_costs(with_alternatives(plain), SILENT).captured
    wider = with_alternatives(plain, "rounding")
    monkeypatch.setenv("TIGHTFIT_CACHE_DIR", str(tmp_path / "empty"))
    ran: list[str] = []
    measured = records._measured

    def counted(captured, call, measure, device):
        ran.append(name_of(call.function))
        return measured(captured, call, measure, device)

    monkeypatch.setattr(records, "_measured", counted)
    found = further_costs(wider, priced, SILENT)
    ways = ("bitwise", "rounding")
    assert found.graph.cost_source == priced.graph.cost_source
    assert 0 < len(ran) <= 2 * sum(len(_ways(found, c)) - len(_ways(priced, c)) for c in ways)
    known = _ways(priced, "bitwise")
    assert known.items() <= _ways(found, "bitwise").items()
    further = _ways(found, "rounding")
    assert any("from_output" in name for _, name in further)
    assert all(v.cost_s > 0 for variants in further.values() for v in variants)


def _ways(captured, exactness: Exactness):
    """Variants of the ways of a class, by node and name."""
    return {
        (node.name, way.name): way.variants
        for op, node in zip(captured.graph.ops, captured.nodes, strict=True)
        for way in op.alternatives
        if way.exactness == exactness
    }
