"""The least peak over all orders of a small graph whose ops each run once, by exhaustive search."""

from __future__ import annotations

import heapq

from tightfit.graph import Graph


def least_peak_of_any_order(graph: Graph) -> int:
    """Return the least peak in bytes over the orders that a step may run in.

    Of graphs of `support.optimum.small_graphs`: one output and one alternative an op, no fates.
    What is alive depends on which ops have run and not on their order, so this is a search for
    the path through sets of ops whose fullest instant is the least full. Pinned ops keep their
    order. Shares no code with any planner.
    """
    everything = frozenset(range(len(graph.ops)))
    best = {frozenset[int](): 0}
    queue: list[tuple[int, tuple[int, ...]]] = [(0, ())]
    while queue:
        peak, done_ops = heapq.heappop(queue)
        done = frozenset(done_ops)
        if done == everything:
            return graph.constant_bytes + peak
        if peak > best[done]:
            continue
        for op in everything - done:
            if not _may_follow(graph, done, op):
                continue
            after = done | {op}
            during = max(peak, _alive_bytes(graph, done, op))
            if during < best.get(after, during + 1):
                best[after] = during
                heapq.heappush(queue, (during, tuple(sorted(after))))
    raise AssertionError("every graph has an order")


def _may_follow(graph: Graph, done: frozenset[int], op: int) -> bool:
    node = graph.ops[op]
    return all(
        earlier.id in done
        for earlier in graph.ops[:op]
        if earlier.id in node.alternatives[0].reads
        or earlier.segment < node.segment
        or (earlier.pinned and node.pinned)
    )


def _alive_bytes(graph: Graph, done: frozenset[int], op: int) -> int:
    """Bytes alive while an op runs after others: what is still read, and what it writes."""
    read_later = {
        value
        for later in graph.ops
        if later.id not in done
        for value in later.alternatives[0].reads
    }
    alive = {value for value in done if value in read_later} | {op}
    workspace = graph.ops[op].alternatives[0].variants[0].workspace_bytes
    return workspace + sum(graph.values[value].size_bytes for value in alive)
