"""Running a model part by part, all parts within one budget.

Two kinds of model are: a model whose parameters FSDP2 shards (`sharded.py`), and one that allows no
single graph (`in_graphs.py`). The parts of the latter are the graphs that Dynamo makes of it.
`steps.py` runs the parts, `planning.py` says by which plan, `choice.py` searches plans for the
kinds of parts (`kinds.py`). Which of them run follows from one rule for all calls of a step
(`session/step`).
"""
