"""The baselines of Checkmate's Table 1: which nodes to checkpoint, then the optimal R."""
