"""Eviction policies: which value an online runtime gives up when memory is full (DTR).

From what is known of a candidate to a score; a table by name. No PyTorch and nothing else of
tightfit, so that planners, simulators and a runtime can share it.
"""
