"""Convolutions: gradients one after the other, a few images at a time, another kernel."""
