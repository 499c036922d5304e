"""Heuristics of the papers: checkpoint everything, every k-th op, by bytes, or by revolve.

From a `Task` to the cheapest of the schedules that one method proposes. Each file is a method;
`checkpoints` and `search` are what they share. Imports `stages` and what is below it.
"""
