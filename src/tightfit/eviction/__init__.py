"""Online eviction (DTR): recorded programs, policies, and replays of a program by a policy.

`log` reads and writes instruction logs; `policies` holds the scores, one family a file. `simulator`
replays a log in a budget with the C++ core; tests compare it with a core in readable Python. No
PyTorch, so that planners, simulator and a runtime share one set.
"""
