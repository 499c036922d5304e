"""Messages about a model that calls `torch.utils.checkpoint` itself."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from tightfit.capture.joint_graph import JointGraph
from tightfit.capture.operators.checkpoints import Checkpoints
from tightfit.progress import announce
from tightfit.session.callee import Callee


def announce_checkpoints(callee: Callee, step: JointGraph, before: Iterable[JointGraph]) -> None:
    """Say where a step differs from a step in which its checkpoints run again in backward.

    `before`: those captured before: a message about one of them is not repeated.
    """
    found = step.checkpoints
    if found in {Checkpoints.NONE, *(other.checkpoints for other in before)}:
        return
    differs = []
    if any(_counts(module) for top in callee.modules.values() for module in top.modules()):
        differs.append(
            "running statistics inside of one are updated once, where plain PyTorch updates them "
            "twice"
        )
    if found is Checkpoints.OTHER_DRAWS:
        differs.append(
            "with preserve_rng_state=False, random numbers of the forward are used in backward, "
            "too, where plain PyTorch draws again"
        )
    if differs:
        announce(
            f"{callee.name} goes through torch.utils.checkpoint: the plan decides which values are "
            f"computed again, and {'; '.join(differs)}"
        )


def _counts(module: nn.Module) -> bool:
    """Whether a module updates running statistics."""
    return module.training and getattr(module, "running_mean", None) is not None
