"""State that a step updates, and whether it affects other results: statistics do not."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import fx

from tightfit.capture.joint_graph import JointGraph
from tightfit.capture.nodes import ancestors_of

aten = torch.ops.aten
_BATCH_NORMS = {  # the statistics among their arguments, and the results that only they decide
    aten._native_batch_norm_legit_functional.default: ((3, 4), (3, 4)),
    aten._batch_norm_with_update_functional.default: ((3, 4), (4, 5)),
}
_IS_TRAINING = 5  # of the arguments of the first; the second always trains


def decided_by_updates(joint: JointGraph) -> list[str]:
    """Return the buffers and inputs that a step writes and whose content decides its outputs.

    Where there are none, the step has the same results and gradients when it is run again after
    it has written.
    """
    written = {joint.placeholders[position]: position for _, position in joint.write_backs}
    roots = [node for node, _ in joint.gradients]
    roots += [node for node in joint.raw_outputs if isinstance(node, fx.Node)]
    deciding = ancestors_of(roots, _read)
    return [joint.sources[position].name for node, position in written.items() if node in deciding]


def are_statistics(node: fx.Node) -> bool:
    """Whether a batch norm makes a value to be kept: running statistics."""
    if node.target is not operator.getitem:
        return False
    norm, result = node.args
    return norm.target in _BATCH_NORMS and result in _BATCH_NORMS[norm.target][1]  # pyright: ignore


def _read(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that decide a node's value."""
    for read in node.all_input_nodes:
        if node.target is operator.getitem and read.target in _BATCH_NORMS:
            yield from _read_by_batch_norm(read, node.args[1])
        else:
            yield read


def _read_by_batch_norm(node: fx.Node, result: object) -> Iterator[fx.Node]:
    """Yield nodes that decide a result of a batch norm: in training, statistics only theirs."""
    statistics, updated = _BATCH_NORMS[node.target]  # pyright: ignore
    trains = "update" in str(node.target) or bool(node.args[_IS_TRAINING])
    for place, read in enumerate(node.args):
        if isinstance(read, fx.Node) and not (
            trains and result not in updated and place in statistics
        ):
            yield read
