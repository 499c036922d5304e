"""Eviction policies: which storage is evicted when memory is full.

A policy is a frozen value: which costs its score counts, whether it divides by bytes and by
staleness, and how it avoids waste of the paper's policy. `registry` knows all of them by name.
"""
