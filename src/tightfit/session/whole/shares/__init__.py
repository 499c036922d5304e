"""Which part of the budget a call of a whole step has.

`flight.py` divides it among calls that await their backward at once, `company.py` tells a budget
of several callables what steps need and leave, `around.py` puts together what lies around a step
and what is left for it.
"""
