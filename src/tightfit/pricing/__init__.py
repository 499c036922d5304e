"""The costs of each op of a captured step: measured call by call, then in real steps.

In: a `Captured` step, and the clock of the steps that are run. Out: the step with costs and
workspaces on its graph (`price`, or `quick` at once), medians of whole steps (`in_steps`), both
kept on disk for the next process. May import graph, costs, capture and torch_private.
"""
