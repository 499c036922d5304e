"""A plan and its cost in three sentences."""

from __future__ import annotations

import msgspec

from tightfit.graph.ir import Graph
from tightfit.plan.explain import Explanation
from tightfit.reporting.html.facts import Measured
from tightfit.units import format_bytes, format_percent, format_seconds


class ProvenBound(msgspec.Struct, frozen=True):
    """A proven lower bound on the overhead, a fraction, and where it comes from."""

    bound: float
    source: str


def summary(
    graph: Graph,
    explained: Explanation,
    *,
    proven: ProvenBound | None = None,
    measured: Measured | None = None,
) -> tuple[str, str, str]:
    """Return the memory of the plan, how it is reached, and its cost.

    `proven`: bounds of the least cost; None: a plan from a file carries no proof.
    """
    return (
        _held(graph.name or "The step", explained, measured),
        _done(graph, explained),
        _cost(explained, proven, graph.cost_source),
    )


def _held(name: str, e: Explanation, measured: Measured | None) -> str:
    saved = 1 - e.peak_bytes / e.eager_peak_bytes if e.eager_peak_bytes else 0.0
    less = f"{100 * saved:.0f} % less than" if saved >= 0.005 else "as much as"
    real = as_measured(None if measured is None else measured.peak_bytes)
    return (
        f"{name} trains within {format_bytes(e.budget_bytes)}: it holds at most "
        f"{format_bytes(e.peak_bytes)}{real}, {less} the "
        f"{format_bytes(e.eager_peak_bytes)} of plain PyTorch; {format_bytes(e.constant_bytes)} "
        "of both are parameters, inputs and the like, which no plan can free."
    )


def as_measured(peak_bytes: int | None) -> str:
    """Return what a sentence adds about a measured peak, if there is one."""
    if peak_bytes is None:
        return ""
    return f" (the last step was measured to hold {format_bytes(peak_bytes)})"


def _done(graph: Graph, e: Explanation) -> str:
    uses = sum(count for _, count in e.alternatives)
    ways = f"{uses} ops run in another way that keeps less (listed below)" if uses else ""
    again = (
        f"{e.recomputed_ops} of {len(graph.ops)} ops are computed again in backward"
        if e.recomputed_ops
        else ""
    )
    moved = (
        f"{format_bytes(e.moved_bytes)} move to far memory and back, for which ops wait "
        f"{format_seconds(e.stall_s)}"
        if e.moved_bytes
        else ""
    )
    done = " and ".join(filter(None, (again, ways, moved)))
    if not done:
        return "Nothing is computed again: each value is freed as soon as it was read last."
    return f"For that, {done}; every other value is kept until it was read last."


def _cost(e: Explanation, proven: ProvenBound | None, cost_source: str) -> str:
    costs = f"costs of operators: {cost_source or 'not named'}"
    if e.overhead < 0:
        cost = f"The step computes {format_percent(-e.overhead)} less than plain PyTorch ({costs})"
    else:
        cost = f"This costs {format_percent(e.overhead)} more computing time ({costs})"
    if proven is None:
        return f"{cost}; a plan from a file does not say how near that is to the least possible."
    if proven.source == "trivial" and e.overhead > proven.bound:
        return f"{cost}; the search ended before anything was proven about the least possible."
    if e.overhead - proven.bound <= 1e-9:
        return f"{cost}, and no plan within this budget is cheaper (proven by {proven.source})."
    return (
        f"{cost}, and no plan within this budget costs less than {format_percent(proven.bound)} "
        f"(proven by {proven.source})."
    )
