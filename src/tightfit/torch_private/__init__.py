"""Every private name of PyTorch that the package uses, and nothing else.

In: objects of PyTorch. Out: the same question or effect under a name of our own, so that a new
release of PyTorch is looked at here first. May import nothing of tightfit.
"""
