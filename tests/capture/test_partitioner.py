"""What PyTorch itself computes again, as plans: checked against PyTorch running for real."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from functorch.compile import aot_module, make_boxed_func, min_cut_rematerialization_partition
from torch import fx, nn
from torch._functorch import config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tightfit.alternatives.registry import with_alternatives
from tightfit.capture.capture import capture
from tightfit.capture.captured import Captured
from tightfit.capture.partitioner import Schedule, checkpoint_schedules, min_cut_schedule
from tightfit.capture.traced_call import TracedCall
from tightfit.errors import BadInput
from tightfit.graph.liveness import eager_peak_bytes
from tightfit.plan.assemble import assemble
from tightfit.plan.plan import Plan
from tightfit.plan.simulate import simulate
from tightfit.plan.verify import verify

COUNTED = ("aten.addmm", "aten.gelu", "aten.native_layer_norm")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(self.act(self.wide(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, blocks: int = 3, width: int = 16, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 4)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x).sum()


def captured(model: nn.Module, *inputs: torch.Tensor) -> Captured:
    return with_alternatives(capture(TracedCall(model, {"model": model}, inputs, {})))


def verified(step: Captured, schedule: Schedule) -> Plan:
    plan = assemble(step.graph, schedule.computes, budget_bytes=2**60)
    verify(plan, step.graph)
    return plan


def counts(step: Captured, schedule: Schedule) -> Counter[str]:
    """How often the counted operators run in a schedule."""
    targets = (step.graph.ops[compute.op].target for compute in schedule.computes)
    names = (".".join(target.split(".")[:2]) for target in targets)
    return Counter(name for name in names if name in COUNTED)


def named(target: Any) -> str:
    return target.name().replace("::", ".").split(".default")[0] if hasattr(target, "name") else ""


@pytest.mark.parametrize("share", [1.0, 0.5, 0.1, 0.0])
def test_the_min_cut_recomputes_what_pytorchs_own_backward_module_does(share: float) -> None:
    torch.manual_seed(0)
    model, x = Stack(), torch.randn(32, 16)
    modules: list[fx.GraphModule] = []

    def keep(module: fx.GraphModule, _: Any) -> Any:
        modules.append(module)
        return make_boxed_func(module.forward)

    with config.patch(activation_memory_budget=share, cse=False):
        aot_module(
            model,
            fw_compiler=keep,
            bw_compiler=keep,
            partition_fn=min_cut_rematerialization_partition,
        )(x).backward()
    ran = Counter(named(node.target) for module in modules for node in module.graph.nodes)
    step = captured(model, x)
    schedule = min_cut_schedule(step, share)
    verified(step, schedule)
    assert counts(step, schedule) == Counter({name: ran[name] for name in COUNTED})


def test_a_checkpoint_per_block_recomputes_what_torch_utils_checkpoint_does() -> None:
    class Count(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.ran: Counter[str] = Counter()

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.ran[named(func)] += 1
            return func(*args, **(kwargs or {}))

    x = torch.randn(32, 16)
    with Count() as count:
        Stack(checkpointed=True)(x).backward()
    step = captured(Stack(), x)
    by_depth = list(checkpoint_schedules(step))
    assert [schedule.setting for schedule in by_depth] == [
        "2 blocks, module names of depth 1",
        "4 blocks, module names of depth 2",
        "16 blocks, module names of depth 3",
    ]
    assert counts(step, by_depth[1]) == Counter({name: count.ran[name] for name in COUNTED})


def test_checkpoints_hold_less_and_cost_more_than_keeping_everything() -> None:
    step = captured(Stack(blocks=6, width=64), torch.randn(256, 64))
    everything = eager_peak_bytes(step.graph)
    per_block = simulate(step.graph, verified(step, list(checkpoint_schedules(step))[1]))
    assert per_block.peak_bytes < 0.6 * everything
    assert len(per_block.recomputed) == 6 * 3
    kept = simulate(step.graph, verified(step, min_cut_schedule(step)))
    assert kept.peak_bytes == everything and not kept.recomputed


def test_batch_norm_is_computed_again_without_its_statistics() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    step = captured(model, torch.randn(2, 3, 8, 8))
    plan = simulate(step.graph, verified(step, min_cut_schedule(step, 0.0)))
    again = {step.graph.ops[op].target for op, _ in plan.recomputed}
    assert "aten._native_batch_norm_legit_functional" in again


def test_what_may_not_run_twice_is_refused_by_name() -> None:
    class Moving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            shifted = (x - self.mean) * self.scale
            self.mean.mul_(0.9)
            return shifted.exp().sin().sum()

    with pytest.raises(BadInput, match="updates"):
        min_cut_schedule(captured(Moving(), torch.randn(8, 4)), 0.0)
