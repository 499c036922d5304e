"""Layouts: from blocks with lifetimes to an offset for each of them.

`blocks` has the values, `largest_load` the bound that no layout is below; blocks come from files
(`io`) or from a plan. `packers` find layouts, `pack` is the door to them, and
`validate` judges every layout without them. The heavy packers are C++ in `_core/packing`; nothing
here imports PyTorch.
"""
