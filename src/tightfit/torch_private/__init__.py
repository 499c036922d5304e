"""Every private name of PyTorch that the package uses, and nothing else.

A new release of PyTorch is looked at here first. May import nothing of tightfit.
"""
