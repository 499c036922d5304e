"""The weights of PyTorch's recurrent modules, in the order in which their kernels take them.

Private names of torch. A module holds them twice: by name, and in a list that its forward reads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

__all__ = ["has_computed_weights", "weights_of", "with_weights"]


def has_computed_weights(module: nn.RNNBase) -> bool:
    """Whether some weights are no parameters: the user's code computes and sets them."""
    return not set(module._flat_weights_names) <= module._parameters.keys()


def weights_of(module: nn.RNNBase) -> list[torch.Tensor]:
    """Return the weights as they are set now."""
    return [getattr(module, name) for name in module._flat_weights_names]


@contextlib.contextmanager
def with_weights(module: nn.RNNBase, weights: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let a module's forward read other weights."""
    module._flat_weights, without = list(weights), module._flat_weights
    try:
        yield
    finally:
        module._flat_weights = without
