"""Models whose parameters FSDP2 (`fully_shard`) spreads over processes: their units are planned."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from tightfit.errors import BadInput

__all__ = ["group_of", "late_bytes", "sharded_parts"]


def sharded_parts(model: nn.Module) -> dict[str, nn.Module]:
    """Return the innermost modules that were given to `fully_shard`, by name; often none.

    Their parameters are gathered whole while their forward runs. A module around other such
    modules runs eagerly in what it does itself.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return {}
    sharded = {n: m for n, m in model.named_modules() if isinstance(m, fsdp.FSDPModule)}
    return {
        name: module
        for name, module in sharded.items()
        if not any(isinstance(m, fsdp.FSDPModule) for m in module.modules() if m is not module)
    }


def group_of(model: nn.Module) -> Any:
    """Return the processes the parameters are spread over; None if it is one alone.

    Raises
    ------
    BadInput
        If only a part of the model was given: its root must be, for the step to be seen whole.
    """
    fsdp = sys.modules["torch.distributed.fsdp"]
    if not isinstance(model, fsdp.FSDPModule):
        raise BadInput(
            "parts of the model were given to fully_shard, but not the model itself: call "
            "fully_shard(model) too, then tightfit.fit(model, ...)"
        )
    group = torch.distributed.group.WORLD
    return group if torch.distributed.get_world_size(group) > 1 else None


def late_bytes(parts: dict[str, nn.Module]) -> int:
    """Return what collectives on a CPU may hold longer than they run: a part's gathered parameters.

    There threads of the process group let go of buffers; on a GPU the stream's order does.
    """
    sizes = [sum(p.numel() * p.element_size() for p in m.parameters()) for m in parts.values()]
    on_cpu = all(p.device.type == "cpu" for m in parts.values() for p in m.parameters())
    return max(sizes, default=0) if on_cpu else 0
