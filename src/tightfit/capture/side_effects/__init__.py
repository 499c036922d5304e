"""What a forward changes or uses besides its inputs: members, generators, hooks.

In: the modules of a call. Out: what puts everything back after a trace, and refusals by name. May
import origins.
"""
