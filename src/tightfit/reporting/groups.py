"""Rows of reports, one for repeated layers: holders of the peak, and recomputation.

Numbers between dots are positions in a list of layers, so ``layer1.0.conv`` and
``layer1.1.conv`` are both in ``layer1.*.conv``.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from tightfit.plan.explain import Holder, ModuleShare


class HolderRow(msgspec.Struct, frozen=True):
    """Values alive at the peak that have the same name in repeated layers."""

    module: str
    name: str
    count: int
    size_bytes: int


class ShareRow(msgspec.Struct, frozen=True):
    """Bytes that repeated layers save together, and their recomputation."""

    module: str
    count: int
    saved_bytes: int
    recomputed_ops: int
    recompute_s: float


def group_names(names: Iterable[str]) -> dict[str, str]:
    """Return the group of each module name; one whose group has no other member keeps its name."""
    names = list(dict.fromkeys(names))
    pattern = {
        name: ".".join("*" if part.isdigit() else part for part in name.split("."))
        for name in names
    }
    sizes = Counter(pattern.values())
    return {name: pattern[name] if sizes[pattern[name]] > 1 else name for name in names}


def holder_rows(holders: Sequence[Holder]) -> tuple[HolderRow, ...]:
    """Return the holders of the peak, the largest first."""
    groups = group_names(holder.module for holder in holders)
    size: Counter[tuple[str, str]] = Counter()
    count: Counter[tuple[str, str]] = Counter()
    for holder in holders:
        name = holder.name.removeprefix(f"{holder.module}: ")
        key = (groups[holder.module], _without_number(name))
        size[key] += holder.size_bytes
        count[key] += 1
    return tuple(
        HolderRow(*key, count[key], total)
        for key, total in sorted(size.items(), key=lambda item: (-item[1], item[0]))
        if total
    )


def share_rows(modules: Sequence[ModuleShare]) -> tuple[ShareRow, ...]:
    """Return the bytes saved at the peak and the recomputation, the most saved first."""
    groups = group_names(share.module for share in modules)
    merged: Mapping[str, list[ModuleShare]] = defaultdict(list)
    for share in modules:
        merged[groups[share.module]].append(share)
    rows = (
        ShareRow(
            name,
            len(shares),
            sum(s.saved_bytes for s in shares),
            sum(s.recomputed_ops for s in shares),
            sum(s.recompute_s for s in shares),
        )
        for name, shares in merged.items()
        if any(s.saved_bytes or s.recomputed_ops for s in shares)
    )
    return tuple(sorted(rows, key=lambda row: (-row.saved_bytes, row.module)))


def _without_number(name: str) -> str:
    """Drop the number of a traced name (not of its output), so that repeated layers share a row."""
    return re.sub(r"_\d+(\.\d+)?$", r"\1", name)
