"""Our plan, executed by Inductor: ``with inductor.budget("8GiB"): torch.compile(model)(x)``.

The plan says which values the forward keeps; Inductor makes the others again in its backward, and
fuses as usual. It need not store fused values, so peaks are near the plan's, not bounded by it:
`tightfit.fit(model, compile=True)` measures and bounds them. Seen with PyTorch 2.13 on a CPU; on a
GPU: not measured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from tightfit.api.saving import plan_saving
from tightfit.torch_private import partitioning
from tightfit.version import __version__

__all__ = ["Partitioner", "budget"]


class Partitioner(partitioning.CustomPartitionerFn):
    """For ``torch._inductor.config.custom_partitioner_fn``: keep the values that the plan keeps.

    Parameters
    ----------
    budget : int or str
        Bytes for a compiled graph: its inputs, parameters among them, and all that it makes.
    """

    def __init__(self, budget: int | str) -> None:
        self.budget = budget
        self.planned_peak_bytes: list[int] = []
        """Of each graph that was compiled."""

    def __call__(
        self,
        gm: fx.GraphModule,
        joint_inputs: Sequence[object],
        *,
        num_fwd_outputs: int,
        **_: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Split a joint graph; errors of planning are those of the compiled call."""
        backward = partitioning.backward_nodes(gm)
        found = plan_saving(
            gm,
            self.budget,
            is_backward=backward.__contains__,
            is_tangent=partitioning.is_tangent,
            device=partitioning.device_of(gm),
        )
        self.planned_peak_bytes.append(found.outcome.peak_bytes)
        return partitioning.split(gm, found.saved, num_fwd_outputs)

    def uuid(self) -> Any:
        """Return a key of the split, for Inductor's cache of compiled graphs."""
        return f"tightfit {__version__}, {self.budget}"


@contextlib.contextmanager
def budget(size: int | str) -> Iterator[Partitioner]:
    """Let all that is compiled in this context keep to a budget.

    Parameters
    ----------
    size : int or str
        As `Partitioner` takes it.
    """
    partitioner = Partitioner(size)
    with partitioning.partitioned_by(partitioner):
        yield partitioner
