"""``tightfit simulate``: replay a recorded program in a budget, as an online runtime would."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tightfit.cli.options import Json
from tightfit.cli.output import print_result
from tightfit.errors import BadInput
from tightfit.eviction.log.resolve import load_log
from tightfit.eviction.policies.registry import DEFAULT, policy_named
from tightfit.eviction.replayed import Deallocation, Replayed
from tightfit.eviction.simulator import Simulator
from tightfit.units import format_bytes, format_percent, parse_bytes

__all__ = ["simulate"]


def simulate(
    log: Path,
    /,
    *,
    policy: str = DEFAULT,
    ratio: float | None = None,
    budget: str | None = None,
    dealloc: Deallocation = "eager",
    thrash: float = 2.0,
    seed: int = 0,
    json: Json = False,
) -> int:
    """Replay an instruction log in a budget: what an online runtime evicts and computes again.

    Parameters
    ----------
    log
        A log of one training step, plain or gzip, such as `tightfit record` writes.
    policy
        What is evicted: improved, improved_ancestors, h_dtr, h_dtr_eq, h_dtr_local, lru, size,
        msps, random, h_e_star, or one of the ablation such as cost=around,size.
    ratio
        The budget as a share of the peak with nothing evicted, such as 0.4.
    budget
        The budget as a size with a unit.
    dealloc
        What happens when the program lets go of a tensor.
    thrash
        Give up when the time computed exceeds the program's own by this factor.
    seed
        Of the random policy.
    """
    chosen = policy_named(policy)
    simulator = Simulator(load_log(log))
    started = time.process_time()
    found = simulator.simulate(
        chosen,
        _budget(simulator, ratio, budget),
        deallocation=dealloc,
        thrash=_factor(thrash),
        seed=seed,
    )
    numbers = _numbers(simulator, found, time.process_time() - started)
    return print_result(
        _text(numbers, found), as_json=json, policy=policy, dealloc=dealloc, **numbers
    )


def _budget(simulator: Simulator, ratio: float | None, budget: str | None) -> int:
    if (ratio is None) == (budget is None):
        raise BadInput("give either --ratio, such as 0.5, or --budget, such as 2GiB")
    if budget is not None:
        return parse_bytes(budget)
    assert ratio is not None
    if not 0 < ratio < 1e6:
        raise BadInput(f"--ratio {ratio:g} must be positive: a share of the peak, such as 0.5")
    return simulator.budget_at(ratio)


def _factor(thrash: float) -> float:
    if not 1 <= thrash < 1e6:
        raise BadInput(f"--thrash {thrash:g} must be 1 or more: times the program's own cost")
    return thrash


def _numbers(simulator: Simulator, found: Replayed, seconds: float) -> dict[str, Any]:
    log = simulator.log
    return {
        "status": found.status,
        "slowdown": found.total_cost_ns / log.base_cost_ns if found.status == "ok" else None,
        "budget_bytes": found.budget_bytes,
        "constant_bytes": log.constant_bytes,
        "base_peak_bytes": log.base_peak_bytes,
        "bottleneck_bytes": log.bottleneck_bytes,
        "max_memory_bytes": found.max_memory_bytes,
        "base_cost_ns": log.base_cost_ns,
        "total_cost_ns": found.total_cost_ns,
        "evictions": found.evictions,
        "evictions_pressure": found.evictions_pressure,
        "evictions_eager": found.evictions_eager,
        "rematerialisations": found.rematerialisations,
        "evaluations": found.evaluations,
        "accesses": found.accesses,
        "max_depth": found.max_depth,
        "instructions": log.instructions,
        "seconds": seconds,
    }


def _text(numbers: dict[str, Any], found: Replayed) -> str:
    budget = format_bytes(found.budget_bytes)
    share = format_percent(found.budget_bytes / (numbers["base_peak_bytes"] or 1))
    given = f"{budget}, {share} of the peak with nothing evicted"
    if found.status == "oom":
        return (
            f"out of memory at {given}: nothing is left to evict; one operator alone has "
            f"{format_bytes(numbers['bottleneck_bytes'])} around it, constants take "
            f"{format_bytes(numbers['constant_bytes'])}; try a larger budget"
        )
    if found.status == "thrash":
        return f"thrashing at {given}: recomputation passes the limit; try a larger budget"
    return (
        f"it fits {given}: {numbers['slowdown']:.3f} times the cost, at most "
        f"{format_bytes(found.max_memory_bytes)} resident, {found.evictions_pressure} evictions "
        f"for want of memory and {found.evictions_eager} of what nobody held, "
        f"{found.rematerialisations} operators run again"
    )
