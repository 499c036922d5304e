"""The arena around a loop: steps are recorded, laid out, and replayed at planned addresses.

`sequence` turns a recorded step into places for its requests. `arena` is the loop's side: which
step is recorded, which replayed, when a new layout is made, and the figures of all steps. Imports
allocator and layout; knows nothing of graphs and plans.
"""
