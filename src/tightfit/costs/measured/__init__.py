"""Costs by measurement on the machine at hand: calls timed and metered, and this CPU's peaks.

The only part of `costs` that imports PyTorch.
"""
