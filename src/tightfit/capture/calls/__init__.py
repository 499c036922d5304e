"""Inputs and outputs of a call: how tensors nest, their layouts, and the guards of a plan.

In: arguments and outputs of a call. Out: flat leaves with a `Structure` to put them back, a
`Geometry` of each tensor, and the signature that tells one step from another.
"""
