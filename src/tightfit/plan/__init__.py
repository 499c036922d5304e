"""Plans: what they are, what they cost, whether they are valid. Never imports torch."""

from tightfit.plan.assemble import assemble, keep_everything
from tightfit.plan.plan import Compute, Enter, Free, HandOver, Instruction, Outcome, Plan
from tightfit.plan.simulate import Simulation, simulate
from tightfit.plan.verify import verify

__all__ = [
    "Compute",
    "Enter",
    "Free",
    "HandOver",
    "Instruction",
    "Outcome",
    "Plan",
    "Simulation",
    "assemble",
    "keep_everything",
    "simulate",
    "verify",
]
