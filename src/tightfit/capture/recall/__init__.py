"""A trace that an earlier process has made, where all that it rests on is the same again.

In: a call, before it is traced. Out: the trace that was kept for such a call, or none. What it
rests on is named so that a name means the same in every process: the code that ran, what that can
have read, inputs, modules, modes, versions. What cannot be named so is not kept.
"""
