"""The weights of PyTorch's recurrent modules, in the order in which their kernels take them.

Private names of torch. A module holds them twice: by name, and in a list that its forward reads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn

from tightfit.torch_private.patches import replaced

_KERNELS = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


def has_computed_weights(module: nn.RNNBase) -> bool:
    """Whether some weights are no parameters: the user's code computes and sets them."""
    return not set(module._flat_weights_names) <= module._parameters.keys()


def weights_of(module: nn.RNNBase) -> list[torch.Tensor]:
    return [getattr(module, name) for name in module._flat_weights_names]


@contextlib.contextmanager
def with_weights(module: nn.RNNBase, weights: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let a module's forward read other weights."""
    with replaced(module, _flat_weights=list(weights)):
        yield


def weights_in(node: fx.Node) -> Sequence[fx.Node] | None:
    """Return the weights that a node of a graph gives to a recurrent kernel; None: it is none.

    Empty for packed sequences, whose weights come later among the arguments.
    """
    if node.op != "call_function" or node.target not in _KERNELS:
        return None
    given = node.args[2]
    return [w for w in given if isinstance(w, fx.Node)] if isinstance(given, list | tuple) else ()


def run_kernel(module: nn.RNNBase, args: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """Call the forward of a module with a kernel's inputs; return outputs as the kernel does."""
    sequence, state, weights, *_ = args
    own = module._parameters
    named = zip(module._flat_weights_names, weights, strict=True)
    computed = {name: weight for name, weight in named if name not in own}
    before = {name: module.__dict__[name] for name in computed if name in module.__dict__}
    module.__dict__.update(computed)
    try:
        with with_weights(module, weights):
            output, last = module.forward(sequence, state)
    finally:
        for name in computed:
            del module.__dict__[name]
        module.__dict__.update(before)
    return (output, *last) if isinstance(last, tuple) else (output, last)
