"""The C++ core against the readable reference, and the paper's two theorems."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.adversary import against
from support.logs import call, linear_network, programs
from support.reference.replay import simulate_in_python
from tightfit.errors import BadInput
from tightfit.eviction.log.instructions import Call, Constant, Instruction, Release
from tightfit.eviction.log.resolve import Event, resolve
from tightfit.eviction.policies.policy import Cost
from tightfit.eviction.policies.registry import POLICIES
from tightfit.eviction.replayed import Deallocation, Placement, Replayed, Rules
from tightfit.eviction.simulator import Simulator

DETERMINISTIC = [name for name in POLICIES if not name.startswith("cost=") and name != "random"]


def outcome(simulator: Simulator, in_python: bool, **asked: object) -> Replayed | str:
    try:
        if in_python:
            return simulate_in_python(simulator, **asked)  # type: ignore[arg-type]
        return simulator.simulate(**asked, with_moments=True)  # type: ignore[arg-type]
    except BadInput as error:
        return str(error)


@settings(max_examples=250)
@given(
    program=programs(),
    policy=st.sampled_from([*POLICIES]),
    deallocation=st.sampled_from(["eager", "banish", "ignore"]),
    placement=st.sampled_from(["bytes"] * 3 + ["arena", "neighbours", "window", "mixed"]),
    ratio=st.floats(0.2, 1.1),
    seed=st.integers(0, 9),
)
def test_the_core_does_what_the_reference_does(
    program: list[Instruction],
    policy: str,
    deallocation: Deallocation,
    placement: Placement,
    ratio: float,
    seed: int,
) -> None:
    if placement != "bytes":  # so that holes of the arena matter
        program = [larger(instruction) for instruction in program]
    simulator = Simulator(resolve(program))
    asked = {
        "policy": POLICIES[policy],
        "budget_bytes": simulator.budget_at(ratio),
        "rules": Rules(deallocation, placement, thrash=6.0),
        "seed": seed,
    }
    assert outcome(simulator, False, **asked) == outcome(simulator, True, **asked)


def larger(instruction: Instruction) -> Instruction:
    """The same with 400 times the bytes."""
    match instruction:
        case Constant(name, size):
            return Constant(name, 400 * size)
        case Call(operator, arguments, results, time):
            grown = tuple(r._replace(size_bytes=400 * r.size_bytes) for r in results)
            return Call(operator, arguments, grown, time)
        case _:
            return instruction


@settings(max_examples=100)
@given(program=programs(), policy=st.sampled_from([*POLICIES]), ratio=st.floats(0.3, 1.2))
def test_memory_stays_within_the_budget_and_results_are_there(
    program: list[Instruction], policy: str, ratio: float
) -> None:
    log = resolve(program)
    simulator = Simulator(log)
    budget = simulator.budget_at(ratio)
    found = simulator.simulate(POLICIES[policy], budget, Rules(thrash=50), with_moments=True)
    assert found.max_memory_bytes <= budget
    if found.status != "ok":
        return
    resident = set(range(len(log.storages)))
    for moment in found.moments:
        storage = log.tensors[moment.tensor].storage
        (resident.discard if moment.kind.startswith("evict") else resident.add)(storage)
    assert {log.tensors[tensor].storage for tensor in log.held} <= resident


def test_enough_memory_evicts_nothing_but_the_dead() -> None:
    simulator = Simulator(resolve(linear_network(9)))
    found = simulator.simulate(POLICIES["h_dtr_eq"], 10**9)
    assert (found.status, found.evictions_pressure, found.rematerialisations) == ("ok", 0, 0)
    assert (found.total_cost_ns, found.evictions_eager) == (18, 17)


def test_banishing_frees_constants_and_refuses_what_is_used_after_its_end() -> None:
    program = [Constant("x", 4), call("y", "x"), Release("x"), call("z", "y", size=4)]
    simulator = Simulator(resolve(program))
    assert simulator.simulate(POLICIES["h_dtr"], 5, Rules("banish")).status == "ok"
    assert simulator.simulate(POLICIES["h_dtr"], 5, Rules("eager")).status == "oom"
    with pytest.raises(BadInput, match="'x' is used after its end"):
        Simulator(resolve([*program, call("w", "x")])).simulate(
            POLICIES["h_dtr"], 99, Rules("banish")
        )


@pytest.mark.parametrize("length", [2**k for k in range(4, 13)])
def test_a_linear_network_needs_a_constant_factor_in_a_square_root_of_memory(length: int) -> None:
    """Theorem 3.1: budget 2 * ceil(sqrt(N)), h_e*, banishing; forward and backward 2 N ops."""
    simulator = Simulator(resolve(linear_network(length)))
    found = simulator.simulate(
        POLICIES["h_e_star"], 2 * math.ceil(math.sqrt(length)), Rules("banish", thrash=99)
    )
    assert found.status == "ok"
    assert found.total_cost_ns <= 4 * length


@pytest.mark.parametrize("policy", DETERMINISTIC)
def test_an_adversary_makes_any_policy_compute_whole_paths_again(policy: str) -> None:
    """Theorem 3.2: the next node always hangs on a path of which nothing is resident."""
    budget, nodes = 5, 60
    computed, by_path = against(policy, budget, nodes)
    assert computed >= nodes**2 / (2 * budget)
    assert by_path == nodes


def test_events_are_as_many_as_the_core_knows() -> None:
    assert [event.value for event in Event] == list(range(5))
    assert [kind.value for kind in Cost] == list(range(8))
