"""Packed sequences in a trace: operators whose kernels look at lengths behind the tracer's back.

Their lengths follow from the inputs. They are looked up, and the padding is then traced as the
slices and copies that the kernels consist of, with the same gradients, bit for bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tightfit.torch_private import core as private

__all__ = ["traced_packing"]

aten = torch.ops.aten


@contextlib.contextmanager
def traced_packing(values_of: Callable[[torch.Tensor], list[int]]) -> Iterator[None]:
    """While tracing, write the padding of packed sequences out.

    Parameters
    ----------
    values_of : callable
        Returns the values of a traced tensor of integers.
    """

    def pad(data: Any, sizes: Any, batch_first: bool, value: Any, length: int) -> Any:
        counts = values_of(sizes)
        lengths = [sum(count > place for count in counts) for place in range(counts[0])]
        return _padded(data, counts, batch_first, value, length), torch.tensor(lengths)

    def pack_backward(gradient: Any, shape: Sequence[int], sizes: Any, batch_first: bool) -> Any:
        length = shape[1] if batch_first else shape[0]
        return _padded(gradient, values_of(sizes), batch_first, 0.0, length)

    kernels = {
        aten._pad_packed_sequence.default: pad,
        aten._pack_padded_sequence_backward.default: pack_backward,
    }
    with private.python_kernels(kernels):
        yield


def _padded(
    data: torch.Tensor, counts: Sequence[int], batch_first: bool, value: Any, length: int
) -> torch.Tensor:
    """Return packed rows as padded sequences; neighbours of one batch size are copied at once."""
    longest = max(length, len(counts))
    shape = (longest, counts[0], *data.shape[1:])
    result = torch.full(shape, value, dtype=data.dtype, device=data.device)
    offset = first = 0
    for place in range(1, len(counts) + 1):
        count = counts[first]
        if place < len(counts) and counts[place] == count:
            continue
        rows = (place - first) * count
        part = data[offset : offset + rows].view(place - first, count, *data.shape[1:])
        result[first:place][:, :count].copy_(part)
        offset, first = offset + rows, place
    return result.transpose(0, 1) if batch_first else result
