"""Parameters and buffers with several names (tied weights): one input for the tracer.

The tracer puts another tensor in the place of each name. A weight with two names would get two
gradients, each a sum of its own. Eager adds up all gradients of its readers in the order in which
they arrive, by any name of the weight. So while the forward is traced every name holds the first
name's stand-in.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

_Slot = tuple[dict[str, Any], str]


class TiedTensors:
    """Which parameters and buffers of a module are the same tensor.

    Inputs of a graph of Dynamo's are not: each tensor is one input, and members are none.

    `module`: that holds all members, before the tracer puts others in their place.
    """

    def __init__(self, module: nn.Module) -> None:
        members: dict[int, list[_Slot]] = {}
        for slot in _slots(module):
            members.setdefault(id(slot[0][slot[1]]), []).append(slot)
        self._names = [group for group in members.values() if len(group) > 1]

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Let every name of a tensor hold the object that its first name holds now."""
        before = [(slot, slot[0][slot[1]]) for group in self._names for slot in group]
        put: list[Any] = []
        for (holder, key), *others in self._names:
            for other, name in others:
                other[name] = holder[key]
            put += [holder[key]] * (len(others) + 1)
        try:
            yield
        finally:
            for ((holder, key), tensor), instead in zip(before, put, strict=True):
                if holder.get(key) is instead:
                    holder[key] = tensor


def _slots(module: nn.Module) -> Iterator[_Slot]:
    """Yield the places of parameters and buffers, each once."""
    for child in module.modules():
        for holder in (child._parameters, child._buffers):
            for key, tensor in holder.items():
                if tensor is not None:
                    yield holder, key
