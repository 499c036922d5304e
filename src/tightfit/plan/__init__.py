"""Plans: their instructions, their cost, their verification.

In: a `Graph` and the computes a planner has chosen, or a plan file. Out: a frozen `Plan`; its
memory byte by byte (`simulate`), whether it keeps every rule and its budget (`verify`, which shares
no code with the rest), and why (`explain`). May import graph, never torch.
"""

from tightfit.plan.assemble import assemble, keep_everything
from tightfit.plan.plan import (
    Compute,
    Enter,
    Far,
    Free,
    HandOver,
    Instruction,
    Load,
    Outcome,
    Plan,
    Store,
)
from tightfit.plan.simulate import Simulation, simulate
from tightfit.plan.verify import verify

__all__ = [
    "Compute",
    "Enter",
    "Far",
    "Free",
    "HandOver",
    "Instruction",
    "Load",
    "Outcome",
    "Plan",
    "Simulation",
    "Store",
    "assemble",
    "keep_everything",
    "simulate",
    "verify",
]
