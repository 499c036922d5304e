"""``tightfit check``: what a budget costs, or what PyTorch's own flags would do."""
