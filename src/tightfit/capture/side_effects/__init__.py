"""What a forward changes or uses besides its inputs: attributes, members, generators, globals.

In: the modules of a call. Out: snapshots that put everything back after a trace, and the tensors
that become inputs or results of the step. May import origins.
"""
