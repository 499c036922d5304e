"""What a call is given and gives back: how tensors nest, layouts, what else a plan depends on.

In: arguments and outputs of a call. Out: flat leaves with a `Structure` to put them back, a
`Geometry` of each tensor, and the signature that tells one step from another.
"""
