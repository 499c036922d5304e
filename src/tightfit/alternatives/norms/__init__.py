"""Norms: computed again, and their gradients from their output."""
