"""Planners: one protocol, a registry, and each method in a file or package of its own."""
