"""A memory policy for torchtitan's graph trainer: ``--compile.memory_policy tightfit``.

``TIGHTFIT_BUDGET=40GiB`` says the budget of a rank's graph: its inputs, sharded parameters among
them, and all that it makes. Import this module where the trainer is configured. The plan's choice
is written as tags, and torchtitan's own pass makes the other values again. Tested with torchtitan's
registry and pass on a CPU; a run of the trainer needs GPUs and was not tried.
"""

from __future__ import annotations

import os
from typing import Any

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from tightfit.api.saving import plan_saving
from tightfit.errors import BadInput, MissingExtra
from tightfit.progress import announce
from tightfit.torch_private.partitioning import device_of, is_tangent
from tightfit.units import format_bytes

try:
    from torchtitan.experiments.graph_trainer.registry import register_memory_policy
except ModuleNotFoundError as error:
    raise MissingExtra(
        f"this policy needs torchtitan 0.3 and {error.name}: pip install torchtitan"
    ) from error

__all__ = ["tag"]


def _is_backward(node: fx.Node) -> bool:
    return bool(node.meta.get("autograd_backward", False))


@register_memory_policy("tightfit")
def tag(gm: fx.GraphModule, *, config: Any) -> fx.GraphModule:
    """Tag each operator of the forward: to be saved, or to be computed again.

    Raises
    ------
    BadInput
        If no budget is set.
    InfeasibleBudget
        If no plan fits it.
    """
    budget = os.environ.get("TIGHTFIT_BUDGET")
    if not budget:
        raise BadInput("the memory policy 'tightfit' needs a budget: set TIGHTFIT_BUDGET=40GiB")
    found = plan_saving(
        gm, budget, is_backward=_is_backward, is_tangent=is_tangent, device=device_of(gm)
    )
    again = set(found.again)
    for node in gm.graph.nodes:
        if node.op == "call_function" and not _is_backward(node):
            policy = CheckpointPolicy
            node.meta["recompute"] = policy.MUST_RECOMPUTE if node in again else policy.MUST_SAVE
    announce(
        f"planned peak {format_bytes(found.outcome.peak_bytes)} of {budget}, extra compute "
        f"{found.outcome.overhead:.1%}"
    )
    return gm
