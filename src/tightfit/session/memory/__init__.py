"""The memory resident around the steps of a fitted callable, and the budget for all of it.

`Account` is the one place that counts (parameters, gradients, buckets, optimizer state) and learns.
`Budget` is one limit for several accounts. `Surroundings` is the frozen value that plans are made
for.
"""
