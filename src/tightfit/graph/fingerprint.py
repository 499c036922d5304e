"""A graph's fingerprint: a hash of all that a plan depends on, and nothing else."""

from __future__ import annotations

import hashlib

import msgspec

from tightfit.graph.ir import Graph


def fingerprint(graph: Graph) -> str:
    """Return a short hash of everything a plan's validity depends on.

    Names, modules, costs, workspaces and constants do not change it: a plan stays applicable
    (and is verified again) when they are measured again.
    """
    structure = (
        graph.format,
        graph.device.granularity_bytes,
        [(v.size_bytes, v.role, v.fate, v.replaces, v.segment) for v in graph.values],
        [
            (
                op.target,
                op.segment,
                op.required,
                op.pinned is not None,
                op.random_state_bytes,
                [
                    (a.name, a.reads, a.writes, a.overwrites, a.use, a.exactness, len(a.variants))
                    for a in op.alternatives
                ],
                *([op.changes] if op.changes else []),
            )
            for op in graph.ops
        ],
        [(s.phase, s.program) for s in graph.segments],
        [choice.branches for choice in graph.choices],
    )
    return hashlib.blake2b(msgspec.msgpack.encode(structure), digest_size=12).hexdigest()
