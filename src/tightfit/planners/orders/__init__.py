"""Orders of first computations that need little memory when nothing is recomputed.

From a `Task` to orders of its graph's ops. `problem` defines allowed changes of an order,
`least_peak` searches, `frees_early` is one pass in milliseconds, `reorder` turns a graph and a plan
from one order into another. See docs/search.md, "Orders".
"""
