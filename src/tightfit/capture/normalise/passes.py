"""Exact clean-ups of a traced step, done before anything else looks at it.

Each pass leaves every bit of the results as it is: it removes copies nobody needs and arguments
nobody reads, and makes explicit what autograd or the epilogue would otherwise do outside the
graph (copies of shared gradients, sums of tied gradients, snapshots of mutated buffers), so that
their bytes are planned.
"""

from __future__ import annotations

from tightfit.capture.decisions.answers import question_of
from tightfit.capture.joint_graph import JointGraph
from tightfit.capture.nodes import classify, is_random
from tightfit.capture.normalise.buffers import correct_statistics, own_write_backs, snapshot_mutated
from tightfit.capture.normalise.casts import share_casts
from tightfit.capture.normalise.compact import compact_results
from tightfit.capture.normalise.convolution import split_convolution_backward
from tightfit.capture.normalise.copies import drop_clones, drop_detaches, drop_unread_arguments
from tightfit.capture.normalise.gradients import own_gradients, sum_in_place
from tightfit.capture.normalise.rewriting import (
    outputs_of,
)
from tightfit.capture.operators.dropout import correct_dropout

__all__ = ["normalise"]


def normalise(joint: JointGraph, tied: list[list[int]]) -> JointGraph:
    """Apply every exact clean-up to a traced step, in place, and return it.

    Parameters
    ----------
    joint : JointGraph
        The traced step.
    tied : list of list of int
        Placeholder positions that hold the same parameter.
    """
    classify(joint.module.graph)
    share_casts(joint, tied)
    correct_statistics(joint)
    correct_dropout(joint.module.graph)
    compact_results(joint.module.graph)
    drop_detaches(joint)
    drop_clones(joint)
    drop_unread_arguments(joint)
    split_convolution_backward(joint)
    sum_in_place(joint)
    own_gradients(joint)
    own_write_backs(joint)
    snapshot_mutated(joint)
    _erase_dead(joint)
    joint.module.recompile()
    return joint


def _erase_dead(joint: JointGraph) -> None:
    """Erase what nobody reads, random operators included.

    A random operator nobody reads still advanced the generator in eager, so it stays; and so does
    one that is asked for the step's sake.
    """
    graph = joint.module.graph
    outputs = outputs_of(joint)
    tail = next(iter(reversed(graph.nodes)))
    tail.args = (tuple(outputs),)
    for node in reversed(list(graph.nodes)):
        unread = node.op == "call_function" and not node.users and node not in outputs
        kept = is_random(node) or question_of(node) is not None
        if (unread and not kept) or (node.op == "get_attr" and not node.users):
            graph.erase_node(node)
