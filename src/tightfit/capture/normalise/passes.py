"""Exact clean-ups of a traced step, done before anything else looks at it.

Each pass leaves every bit of the results as it is. It removes unnecessary copies and unread
arguments. It makes work of autograd or of the epilogue outside the graph explicit, so that its
bytes are planned: copies of shared gradients, sums in place, snapshots of mutated buffers.
"""

from __future__ import annotations

from collections.abc import Callable

from tightfit.capture.joint_graph import JointGraph
from tightfit.capture.nodes import is_random, note_views
from tightfit.capture.normalise.buffers import (
    correct_statistics,
    own_write_backs,
    read_written_inputs,
    snapshot_mutated,
)
from tightfit.capture.normalise.casts import share_casts
from tightfit.capture.normalise.compact import compact_results
from tightfit.capture.normalise.copies import drop_clones, drop_detaches, drop_unread_arguments
from tightfit.capture.normalise.dropout import correct_dropout
from tightfit.capture.normalise.gradients import add_inside_opaque, own_gradients, sum_in_place
from tightfit.capture.normalise.rewriting import Rewriting
from tightfit.capture.operators.linalg import is_check


def normalise(joint: JointGraph) -> JointGraph:
    """Return a traced step after every exact clean-up."""
    work = Rewriting(joint)
    for each in PASSES:
        each(work)
    return work.finished()


def find_views(work: Rewriting) -> None:
    """Note which nodes are views, while the fake tensors still tell."""
    note_views(work.graph)


def erase_dead(work: Rewriting) -> None:
    """Erase nodes that are not read.

    A random operator without readers still advanced the generator in eager, so it stays. So does an
    operator that only checks, and may raise an error.
    """
    outputs = work.outputs
    tail = work.graph.output_node()
    tail.args = (tuple(outputs),)
    for node in reversed(list(work.graph.nodes)):
        unread = node.op == "call_function" and not node.users and node not in outputs
        kept = is_random(node) or is_check(node)
        if (unread and not kept) or (node.op == "get_attr" and not node.users):
            work.graph.erase_node(node)


PASSES: tuple[Callable[[Rewriting], None], ...] = (
    find_views,
    share_casts,
    correct_statistics,
    correct_dropout,
    compact_results,
    drop_detaches,
    drop_clones,
    drop_unread_arguments,
    add_inside_opaque,
    sum_in_place,
    own_gradients,
    snapshot_mutated,
    read_written_inputs,
    own_write_backs,
    erase_dead,
)
"""The passes, in this order: later passes count on results of earlier passes."""
