"""Runs a callable as one graph.

`steps.py` runs the calls. `captures.py` owns the captured steps, by signature; a `Specialisation`
is one captured step with its plans. `plans.py` chooses the plan of a call, `call_shares.py` its
part of the budget, and `planning.py` finds a plan for memory resident around a step now. Where no
plan has room for all that is expected, `optimistic.py` plans for less, and `advice.py` names a
budget. `comparing.py` compares alternatives between steps. `learning.py` measures steps and learns
from them; `compiling.py` tries compiled plans.
"""
