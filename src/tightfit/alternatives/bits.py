"""A boolean for each element in one bit: eight in a byte, in stretches of bounded size.

Eight bytes of 0 and 1 are one 64-bit number; a multiplication gathers their bits in its highest
byte, and another spreads a byte over eight. Little-endian: element i of eight is bit i.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import fx

from tightfit.alternatives.base import Extra, OpView, is_dense

_ON_CPU = 1 << 18  # elements at once: a megabyte of temporaries
_ON_GPU = 1 << 25  # fewer and larger kernels


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


_GATHER = _signed(0x0102040810204080)
_SPREAD = _signed(0x0101010101010101)
_OWN_BIT = _signed(0x8040201008040201)
_CARRY = _signed(0x7F7F7F7F7F7F7F7F)


def flat(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor's elements in the order of memory, laid out by these dense strides.

    On a CPU those of an expanded number, as the gradient of an output may be, take no memory.
    """
    if tensor.device.type == "cpu" and not any(tensor.stride()):
        return tensor.as_strided((tensor.numel(),), (0,))
    if tensor.stride() != strides:
        other = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
        tensor = other.copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def bit_bytes(elements: int) -> int:
    return -(-elements // 8)


def stretches(tensor: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield stretches of a tensor's elements, and the bytes that hold their bits."""
    step = _ON_CPU if tensor.device.type == "cpu" else _ON_GPU
    for start in range(0, tensor.numel(), step):
        end = min(start + step, tensor.numel())
        yield slice(start, end), slice(start // 8, bit_bytes(end))


def packed(
    tensor: torch.Tensor,
    strides: tuple[int, ...],
    write: Callable[[torch.Tensor, torch.Tensor], None],
) -> torch.Tensor:
    """Return a bit for each element of a dense tensor, in the order of memory.

    `write`: writes the bits of elements.
    """
    bits = torch.empty(bit_bytes(tensor.numel()), dtype=torch.uint8, device=tensor.device)
    write(flat(tensor, strides), bits)
    return bits


def by_stretches(
    flags: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Return a function that writes bits of elements, some at a time.

    `flags`: makes booleans of some of the elements, in memory of their own.
    """

    def write(elements: torch.Tensor, bits: torch.Tensor) -> None:
        for part, its_bits in stretches(elements):
            pack(flags(elements[part]), bits[its_bits])

    return write


def pack(flags: torch.Tensor, out: torch.Tensor) -> None:
    """Write flags as bits; the memory of the flags is used on the way.

    `flags` [n]: dense; lost afterwards. `out` [ceil(n / 8)]: written.
    """
    flags = flags.view(torch.uint8)
    whole = flags.numel() // 8 * 8
    gathered = flags[:whole].view(torch.int64).mul_(_GATHER).bitwise_right_shift_(56)
    out[: whole // 8].copy_(gathered.view(torch.uint8)[::8])
    if whole < flags.numel():
        rest = flags[whole:]
        places = torch.arange(rest.numel(), dtype=torch.uint8, device=rest.device)
        out[-1:].copy_(rest.bitwise_left_shift_(places).sum(dtype=torch.uint8).view(1))


def bits_of(
    view: OpView,
    name: str,
    function: Callable[[torch.Tensor, tuple[int, ...]], torch.Tensor],
    node: fx.Node,
    gradient: fx.Node,
) -> Extra | None:
    """Return an op that makes a bit for each element of a dense tensor, of it and its strides.

    None: its gradient has other strides.
    """
    value = node.meta["val"]
    strides = tuple(value.stride())
    if not is_dense(value) or tuple(gradient.meta["val"].stride()) != strides:
        return None
    made = value.new_empty(bit_bytes(value.numel()), dtype=torch.uint8)
    return view.extra(name, function, node, strides, made=made)


def unpack(bits: torch.Tensor, elements: int) -> torch.Tensor:
    """Return so many flags from their bits.

    `bits` [ceil(elements / 8)]: as `pack` wrote them. Returns uint8 Tensor, [elements]: 0 or 1
    each.
    """
    spread = bits.to(torch.int64).mul_(_SPREAD).bitwise_and_(_OWN_BIT)
    spread = spread.add_(_CARRY).bitwise_right_shift_(7).bitwise_and_(_SPREAD)
    return spread.view(torch.uint8)[:elements]
