"""A fitted callable across calls: its captured steps, its plans, the memory it holds.

In: a `Callee`, `Options` and the inputs of each call. Out: the outputs of the call, whose backward
is planned, and a `Report`. `fitted.py` chooses the route of a callable: `whole/` runs it as one
graph, `parts/` module by module. `memory/` counts resident memory, `step/` divides a limit among
calls, and `on_gpu/` places steps on a GPU. Every stage from capture to plan is a function in
`stages.py`. May import every room below; never `zoo`, `reporting`, `studies`, `api`, `cli`.
"""
