"""One limit for all planned calls of a step, of any graph and callable.

`holding.py` has the bytes of a call under a plan. `ledger.py` has the bytes of a step, as measured
and with other plans; `edits.py` has those of a step with other calls. `observed.py` writes the
ledger of the current step, and `shares.py` divides a limit among its calls. `window.py` predicts
which calls a step will have, and `presumed.py` the bytes that calls not measured yet may keep.
`again.py` runs a call again in its backward, on the inputs that `held.py` holds for it;
`repeated.py` notes which calls that happens to.
"""
