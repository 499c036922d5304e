"""The default planner: a plan in milliseconds, then better ones and a rising bound.

From a `Task` to an `AnytimeResult`. `planner` is the entry, `strategy` the order of work, `search`
the state and its pieces; the rest gives bounds (`bound`, `kcut`), seeds (`seeds` and files it
calls) and polish. How it works, and why its bounds hold: docs/search.md. Imports `engine`, and
other methods for their plans.
"""
