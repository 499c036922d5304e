"""The memory that is held at the begin of a call, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HeldAtCall:
    """The memory held at the begin of a call, in bytes."""

    gradient_bytes: int  # gradients that exist, with the buckets they go into
    # state_bytes, coming_bytes: the optimizers' state that is there, and that will be
    state_bytes: int
    coming_bytes: int
    # Other bytes allocated since the callable was fitted and still held: outputs of steps
    # before, averages of weights, other models; but not the inputs
    others_bytes: int
    others_coming_bytes: int  # gradients and state that others within the same budget will hold
    # Which inputs were there before the callable was fitted: a data set, say. They do not count
    # against the limit.
    earlier_inputs: tuple[int, ...] = ()
    # Those of them that are parts of larger tensors. Others may be made again for each call.
    earlier_parts: tuple[int, ...] = ()
