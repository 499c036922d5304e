"""Models for the demo, the command line and the benchmarks: `make` and the table `MODELS`.

All are written here in plain `torch.nn`, follow the standard architectures (named in each file)
and start from random weights: draw them reproducibly with ``torch.manual_seed``.
"""

from tightfit.zoo.example import Example
from tightfit.zoo.registry import MODELS, Entry, make

__all__ = ["MODELS", "Entry", "Example", "make"]
