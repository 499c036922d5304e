"""What running an op costs: modelled by name (`with_costs`, no torch) or measured.

Measuring (`tightfit.costs.measured.call`) needs torch and is imported from there.
"""

from tightfit.costs.cache import Cache
from tightfit.costs.machines import MACHINES, Machine
from tightfit.costs.registry import COST_SOURCES, with_costs

__all__ = ["COST_SOURCES", "MACHINES", "Cache", "Machine", "with_costs"]
