"""Costs of ops: modelled by name, or measured.

In: a `Graph`, or a call on tensors. Out: the graph with costs (`with_costs`), or time and bytes of
the call (`costs.measured`, the only part that imports PyTorch). May import graph; `costs.measured`
also allocator and torch_private.
"""

from tightfit.costs.cache import Cache
from tightfit.costs.machines import MACHINES, Machine
from tightfit.costs.registry import COST_SOURCES, refuse_unknown_costs, with_costs

__all__ = ["COST_SOURCES", "MACHINES", "Cache", "Machine", "refuse_unknown_costs", "with_costs"]
