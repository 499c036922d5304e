"""One limit for all planned calls of a step, whichever graphs and callables they are of.

`holding.py` says what a call holds under a plan, `ledger.py` what a step held and would hold with
other plans, `edits.py` what it would hold with other calls. `observed.py` writes the ledger of the
current step, and `shares.py` is the one rule that divides a limit. `window.py` predicts which calls
a step will have, and `presumed.py` what those may keep that were not measured yet.
"""
