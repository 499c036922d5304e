"""One limit for all planned calls of a step, whichever graphs and callables they are of.

`holding.py` has the bytes of a call under a plan. `ledger.py` has the bytes of a step, as measured
and with other plans; `edits.py`, those of a step with other calls. `observed.py` writes the ledger
of the current step, and `shares.py` is the one rule that divides a limit. `window.py` predicts
which calls a step will have, and `presumed.py` the bytes that calls not measured yet may keep.
`again.py` runs a call again in its backward, on the inputs that `held.py` holds for it;
`repeated.py` knows which calls may need that.
"""
