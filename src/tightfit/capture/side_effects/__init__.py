"""Side effects of a forward: members, generators, hooks.

In: the modules of a call. Out: functions that restore everything after a trace, and refusals by
name. May import origins.
"""
