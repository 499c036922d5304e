"""Theorem 3.2 of the DTR paper: for every policy a program that it computes again and again."""

from __future__ import annotations

from dataclasses import replace

from support.logs import call
from tightfit.eviction.log.instructions import Constant, Instruction
from tightfit.eviction.log.resolve import resolve
from tightfit.eviction.policies.registry import POLICIES
from tightfit.eviction.replayed import Replayed, Rules
from tightfit.eviction.simulator import Simulator


def against(policy: str, budget: int, nodes: int) -> tuple[int, int]:
    """Return how many operators a policy computes, and one who knows the program beforehand.

    Parameters
    ----------
    policy : str
        A deterministic one.
    budget : int
        Tensors that fit; the program is as many paths from one constant.
    nodes : int
        Of the program: the next one always hangs on a path of which nothing is resident.
    """
    paths = [[f"{j}.0"] for j in range(budget)]
    program: list[Instruction] = [Constant("t", 1), *(call(path[0], "t") for path in paths)]
    while sum(map(len, paths)) < nodes:
        resident = _resident_names(program, policy, budget)
        path = next(path for path in paths if not resident.intersection(path))
        path.append(f"{path[0].split('.')[0]}.{len(path)}")
        program.append(call(path[-1], path[-2]))
    by_path = [
        call(name, before) for p in paths for before, name in zip(["t", *p], p, strict=False)
    ]
    return _cost(program, policy, budget), _cost([Constant("t", 1), *by_path], policy, budget)


def _run(program: list[Instruction], policy: str, budget: int) -> tuple[Simulator, Replayed]:
    """A program that is not over yet: nothing has to be there at its end."""
    simulator = Simulator(replace(resolve(program), held=()))
    found = simulator.simulate(POLICIES[policy], budget, Rules(thrash=1e6), with_moments=True)
    assert found.status == "ok"
    return simulator, found


def _cost(program: list[Instruction], policy: str, budget: int) -> int:
    return _run(program, policy, budget)[1].total_cost_ns


def _resident_names(program: list[Instruction], policy: str, budget: int) -> set[str]:
    simulator, found = _run(program, policy, budget)
    resident = set(range(len(simulator.log.tensors)))
    for moment in found.moments:
        (resident.discard if moment.kind == "evict" else resident.add)(moment.tensor)
    return {simulator.log.tensors[n].name for n in resident}
