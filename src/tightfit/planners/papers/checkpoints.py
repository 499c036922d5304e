"""Where checkpoints may be, and the schedule that a set of checkpoints means."""

from __future__ import annotations

from collections.abc import Collection

from tightfit.plan.plan import Compute
from tightfit.planners.papers.stages.schedule import forced_residency, hold, last_uses, recompute
from tightfit.planners.papers.stages.staged import Staged


def forward_nodes(problem: Staged) -> list[int]:
    """Return the nodes of the forward pass in order, without isolated nodes.

    A node is isolated if it reads nothing and nothing reads its values: a step counter.
    """
    read = {value for node in problem.nodes for value in node.first.reads}
    return [
        index
        for index, node in enumerate(problem.nodes)
        if node.is_forward and (node.first.reads or not read.isdisjoint(node.first.writes))
    ]


def forward_bytes(problem: Staged, node: int) -> int:
    return problem.size(problem.nodes[node].first.writes)


def articulation_points(problem: Staged) -> list[int]:
    """Return the forward nodes whose removal disconnects the forward pass (undirected).

    As in Checkmate, section 5.1.1.
    """
    import networkx

    nodes = forward_nodes(problem)
    producers = {
        node: [problem.values[value].producer for value in problem.nodes[node].first.reads]
        for node in nodes
    }
    edges = [(p, node) for node, read in producers.items() for p in read if p in producers]
    graph = networkx.Graph(edges)
    return sorted(networkx.articulation_points(graph))


def checkpoint_schedule(problem: Staged, checkpoints: Collection[int]) -> list[Compute]:
    """Return the schedule that keeps only results of the checkpointed nodes.

    In the forward pass a value stays until its last forward reader, results of a checkpoint as long
    as they can be of use. In the backward pass missing values are computed again from the nearest
    resident values (the optimal R) and stay until their last reader. The segment after the last
    checkpoint is kept, since its backward pass comes next.
    """
    last = max(checkpoints, default=-1)
    rows = forced_residency(problem)
    backward = [index for index, node in enumerate(problem.nodes) if not node.is_forward]
    start = backward[0] if backward else len(problem.nodes)
    for reader, node in enumerate(problem.nodes):
        for value in node.first.reads:
            stored = problem.values[value]
            producer = stored.producer
            kept = producer is None or producer > last
            first = stored.begins if kept or reader < start else max(stored.begins, start + 1)
            hold(rows, value, first, reader)
    uses = last_uses(problem)
    for checkpoint in checkpoints:
        for value in problem.nodes[checkpoint].first.writes:
            hold(rows, value, problem.values[value].begins, uses[value])
    return recompute(problem, rows, ahead=False)
