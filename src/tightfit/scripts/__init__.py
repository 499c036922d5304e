"""A user's program run twice, plain and fitted, each in a process of its own, and compared.

In: a script with its arguments, a budget, a number of optimizer steps. Out: a `ScriptProof`. This
room may import all but `cli`.
"""
