"""A fitted callable, from call to call: its captured steps, the plan that runs now, memory held.

In: a `Callee`, `Options` and the inputs of each call. Out: the call's outputs, with a planned
backward behind them, and a `Report`. `fitted.py` says which way a callable runs (a *route*):
`whole/` as one graph, `parts/` module by module. `memory/` counts resident memory; every stage
from capture to plan is a function in `stages.py`. May import every room below; never `zoo`,
`reporting`, `studies`, `api`, `cli`.
"""
