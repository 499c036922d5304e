"""Eviction policies: DTR without PyTorch."""
