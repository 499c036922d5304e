"""How many terms autograd adds up in each gradient of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from tightfit.torch_private import engine


def terms_of_gradients(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> list[int]:
    """Return for each input from how many operators its gradient comes: autograd adds these up.

    `outputs`: whose gradients come in. `inputs`: whose gradients are asked for.
    """
    arriving = Counter(map(engine.gradient_edge, outputs))
    seen = {node for node, _ in arriving}
    waiting = list(seen)
    while waiting:
        for edge in waiting.pop().next_functions:
            arriving[edge] += 1
            if edge[0] is not None and edge[0] not in seen:
                seen.add(edge[0])
                waiting.append(edge[0])
    return [arriving[engine.gradient_edge(each)] for each in inputs]
