"""Where launches take longer than kernels, an operator costs what it takes to launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tightfit.capture.capture import capture
from tightfit.capture.traced_call import TracedCall
from tightfit.costs.measured.call import Measurement, measure_call
from tightfit.pricing.price import measured_costs
from tightfit.progress import SILENT


@pytest.mark.parametrize(("launch_s", "is_bound"), [(5e-6, False), (20e-6, True)])
def test_a_step_that_is_bound_by_launches_is_priced_by_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, launch_s: float, is_bound: bool
) -> None:
    """With kernels of 10 us, and one that takes 50."""
    monkeypatch.setenv("TIGHTFIT_CACHE_DIR", str(tmp_path))

    def measured(function: Any, *args: Any, **kwargs: Any) -> Measurement:
        found = measure_call(function, *args, **kwargs)
        cost_s = 50e-6 if "tanh" in str(function) else 10e-6
        fields = {name: getattr(found, name) for name in Measurement.__struct_fields__}
        return Measurement(**fields | {"cost_s": cost_s, "launch_s": launch_s})

    monkeypatch.setattr("tightfit.pricing.price.measure_call", measured)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)], nn.Tanh())
    captured = capture(TracedCall(model, {"model": model}, (torch.randn(4, 8),), {}))
    graph = measured_costs(captured, SILENT).captured.graph
    costs = {variant.cost_s for op in graph.ops for variant in op.alternatives[0].variants}
    assert costs == ({launch_s} if is_bound else {10e-6, 50e-6})


def test_on_a_cpu_a_launch_is_part_of_the_cost() -> None:
    found = measure_call(torch.relu, (torch.randn(64, 64),), device="cpu", seconds=0.01)
    assert found.launch_s == 0 and found.cost_s > 0
