"""``tightfit check``: the overhead of a budget, or the effect of PyTorch's own flags."""
