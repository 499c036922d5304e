"""A plan of a graph as one of the same graph whose ops have further alternatives."""

from __future__ import annotations

import msgspec

from tightfit.graph.alternatives import number_among
from tightfit.graph.fingerprint import fingerprint
from tightfit.graph.ir import Graph
from tightfit.plan.plan import Compute, Instruction, Plan


def renumbered(plan: Plan, before: Graph, after: Graph) -> Plan | None:
    """Return a plan with the numbers that its alternatives have in another graph.

    `before`, `after`: of the same ops and values, but for their alternatives. The plan is not
    verified; None if the other graph lacks one of its alternatives.
    """
    instructions: list[Instruction] = []
    for each in plan.instructions:
        if isinstance(each, Compute):
            number = number_among(before, after, each.op, each.alternative)
            if number is None:
                return None
            instructions.append(msgspec.structs.replace(each, alternative=number))
        else:
            instructions.append(each)
    return msgspec.structs.replace(plan, graph=fingerprint(after), instructions=tuple(instructions))
