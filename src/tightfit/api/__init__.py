"""The public functions: signatures, docstrings and checks of input, without any state.

The work itself is in `session` (training in a budget), `studies` (looking at a model, proving) and
`planners` (searching). The names are handed out by `tightfit/__init__.py`.
"""
