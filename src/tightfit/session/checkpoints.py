"""Messages about a model that calls `torch.utils.checkpoint` itself."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from tightfit.capture.joint_graph import JointGraph
from tightfit.capture.operators.checkpoints import Checkpoints
from tightfit.progress import announce
from tightfit.session.callee import Callee


def announce_checkpoints(callee: Callee, step: JointGraph, earlier: Iterable[JointGraph]) -> None:
    """Announce how a step differs from plain PyTorch, which runs its checkpoints again in backward.

    `earlier`: steps captured before: what was announced of them is not repeated.
    """
    found = step.checkpoints
    if found in {Checkpoints.NONE, *(other.checkpoints for other in earlier)}:
        return
    differs = []
    if any(
        _updates_statistics(module) for top in callee.modules.values() for module in top.modules()
    ):
        differs.append(
            "running statistics inside a checkpoint are updated once, where plain PyTorch updates "
            "them twice"
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


def _updates_statistics(module: nn.Module) -> bool:
    return module.training and getattr(module, "running_mean", None) is not None
