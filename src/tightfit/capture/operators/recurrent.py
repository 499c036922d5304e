"""Recurrent cells in a trace: gates are side by side in memory, as in eager.

`gru_cell` computes its gates in place, in slices of one wide tensor. Traced, each would have a
storage of its own, where a kernel rounds some of its elements differently.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tightfit.torch_private import core as private


def gru_cell(
    x: Tensor,
    hidden: Tensor,
    input_weight: Tensor,
    hidden_weight: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> Tensor:
    """Return the next hidden state, bit for bit as torch's composite of kernels on a CPU."""
    weights = input_weight, hidden_weight, input_bias, hidden_bias
    if x.device.type != "cpu":
        return private.composite(torch.ops.aten.gru_cell.default, x, hidden, *weights)
    sizes = [2 * hidden.shape[1], hidden.shape[1]]
    of_input = F.linear(x, input_weight, input_bias).unsafe_split_with_sizes(sizes, 1)
    of_hidden = F.linear(hidden, hidden_weight, hidden_bias).unsafe_split_with_sizes(sizes, 1)
    reset, update = (of_hidden[0] + of_input[0]).unsafe_chunk(2, 1)
    new = (of_input[1] + of_hidden[1] * reset.sigmoid()).tanh()
    return (hidden - new) * update.sigmoid() + new
