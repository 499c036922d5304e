"""Elementwise operators run together with the makers of their arguments, a stretch at a time.

A ReLU behind a BatchNorm is made again from the BatchNorm's input: both run on a stretch that fits
in the processor's cache. Memory is read once and written once, and the value between them never
exists as a whole. The gradient of a SiLU, which reads a BatchNorm's output, does the same: then
only the BatchNorm's input has to be kept. So does a product in the backward: the gradient of a gate
needs the tensor it scaled, the gradient of an RMSNorm's weight needs the normalised input.

The bits are the same as of one operator after the other where a function gives the same for a
vector of the processor and for one number. An exponential does not: there the last few elements of
a stretch may round differently, unless stretches are whole vectors.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tightfit.alternatives.base import Extension, Implementation, OpView, arguments_of, is_dense
from tightfit.alternatives.norms.again import normalise_with_statistics, statistics_of
from tightfit.capture.nodes import is_getitem

aten = torch.ops.aten

_FORWARD = (
    aten.relu.default,
    aten.hardtanh.default,
    aten.leaky_relu.default,
    aten.elu.default,
    aten.gelu.default,
    aten.silu.default,
    aten.hardswish.default,
    aten.hardsigmoid.default,
    aten.mish.default,
    aten.sigmoid.default,
    aten.tanh.default,
    aten.add.Tensor,
    aten.mul.Tensor,
)
_BACKWARD = (
    aten.threshold_backward.default,
    aten.hardtanh_backward.default,
    aten.leaky_relu_backward.default,
    aten.elu_backward.default,
    aten.gelu_backward.default,
    aten.silu_backward.default,
    aten.hardswish_backward.default,
    aten.hardsigmoid_backward.default,
    aten.mish_backward.default,
)
TOGETHER = (*_FORWARD, *_BACKWARD)

_SAME_IN_VECTORS = frozenset(
    {
        aten.relu.default,
        aten.hardtanh.default,
        aten.leaky_relu.default,
        aten.add.Tensor,
        aten.mul.Tensor,
        aten.threshold_backward.default,
        aten.hardtanh_backward.default,
        aten.leaky_relu_backward.default,
    }
)
_VECTORS = 64  # elements: a multiple of the vectors of any processor's kernels

_NORM = aten._native_batch_norm_legit_functional.default
_AT_ONCE = 1 << 18  # elements: values passed between operators stay in the cache of a core

Cut = tuple[int, int, int]  # dimension, start, length


@dataclass(frozen=True)
class Read:
    """A tensor that a chain is given, by its position."""

    position: int


@dataclass(frozen=True)
class Intermediate:
    """The result of an earlier link of a chain, by the link's position."""

    position: int


@dataclass(frozen=True)
class Link:
    """One elementwise operator of a chain."""

    function: Any  # the operator
    arguments: tuple[
        Any, ...
    ]  # as it takes them; tensors are given by a `Read` or an `Intermediate`
    keywords: tuple[tuple[str, Any], ...] = ()  # further ones, none of them tensors

    def run(self, stretches: Stretches, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the operator's result for a stretch, in `out` if that is given."""
        arguments = [stretches.given(argument) for argument in self.arguments]
        if out is None:
            return self.function(*arguments, **dict(self.keywords))
        packet = self.function.overloadpacket
        for keyword in ("out", "grad_input"):
            if hasattr(packet, keyword):
                writing = getattr(packet, keyword)
                return writing(*arguments, **dict(self.keywords), **{keyword: out})
        return out.copy_(self.function(*arguments, **dict(self.keywords)))


@dataclass(frozen=True)
class Norm:
    """A BatchNorm as the first link of a chain, by the statistics of its first run."""

    # x, mean, deviation: the input, and both statistics
    x: Read
    # weight, bias: one number for each channel
    weight: Read | None
    bias: Read | None
    mean: Read
    deviation: Read

    def run(self, stretches: Stretches, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return a normalised stretch, in `out` if that is given."""
        names = (self.x, self.weight, self.bias, self.mean, self.deviation)
        return normalise_with_statistics(*map(stretches.given, names), out=out)


class Stretches:
    """The stretches of all tensors of a chain between two cuts.

    `cuts` (tuple of (dimension, start, length)): where the stretch is in the result.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], cuts: tuple[Cut, ...], dimensions: int
    ) -> None:
        self._tensors = [_cut(tensor, cuts, dimensions) for tensor in tensors]
        self._made: list[torch.Tensor] = []

    def given(self, argument: Any) -> Any:
        """Return the tensor of an argument of a link."""
        if isinstance(argument, Read):
            return self._tensors[argument.position]
        return self._made[argument.position] if isinstance(argument, Intermediate) else argument

    def run(self, links: Sequence[Link | Norm], out: torch.Tensor, over: Sequence[bool]) -> None:
        """Write the result of the last link; `over`: which links may write there."""
        for link, there in zip(links, over, strict=True):
            self._made.append(link.run(self, out if there else None))


def run_together(
    links: tuple[Link | Norm, ...],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    *tensors: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the result of the last link of a chain, a stretch at a time.

    `links` (tuple of (Link or Norm)): in the order in which they run. `shape`, `strides`: of the
    result, which is dense. `tensors`: inputs of the chain: of the result's shape, or broadcast
    to it, or one number for each channel (dimension 1). `out`: of the result's geometry: written
    over; may be one of the tensors.
    """
    over = [False] * (len(links) - 1) + [True]
    if out is None:
        like = tensors[0]
        out = torch.empty_strided(shape, strides, dtype=like.dtype, device=like.device)
        over = _over_each_other(links)
    for cuts in _stretches(shape, _outermost_first(strides)):
        Stretches(tensors, cuts, len(shape)).run(links, _cut(out, cuts, len(shape)), over)
    return out


def _over_each_other(links: Sequence[Link | Norm]) -> list[bool]:
    """Return links that may write where the result goes: values there are not needed later."""
    last_read = [0] * len(links)
    for number, link in enumerate(links):
        for argument in link.arguments if isinstance(link, Link) else ():
            if isinstance(argument, Intermediate):
                last_read[argument.position] = number
    over: list[bool] = []
    for number in range(len(links)):
        over.append(not any(o and last_read[k] > number for k, o in enumerate(over)))
    return over


def run_together_over(
    links: tuple[Link | Norm, ...],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    gradient: torch.Tensor,
    *others: torch.Tensor,
) -> torch.Tensor:
    """Write the result of the last link over the first tensor that the chain is given."""
    return run_together(links, shape, strides, gradient, *others, out=gradient)


def _outermost_first(strides: tuple[int, ...]) -> list[int]:
    return sorted(range(len(strides)), key=lambda dimension: -strides[dimension])


def _stretches(shape: tuple[int, ...], dimensions: Sequence[int]) -> Iterator[tuple[Cut, ...]]:
    """Yield the stretches of a tensor, as far as these dimensions have to be cut for them."""
    elements = 1
    for dimension in dimensions:
        elements *= shape[dimension]
    if elements <= _AT_ONCE:
        yield ()
        return
    outer, *inner = dimensions
    step = max(1, _AT_ONCE * shape[outer] // elements)
    for start in range(0, shape[outer], step):
        length = min(step, shape[outer] - start)
        for rest in _stretches(shape, inner) if step == 1 else ((),):
            yield ((outer, start, length), *rest)


def _cut(tensor: torch.Tensor, cuts: tuple[Cut, ...], dimensions: int) -> torch.Tensor:
    """Return a stretch of a tensor; where it is broadcast, all of it."""
    for dimension, start, length in cuts:
        if tensor.dim() == dimensions and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, start, length)
        elif tensor.dim() == 1 and dimension == 1:
            tensor = tensor.narrow(0, start, length)
    return tensor


def together(view: OpView) -> Extension | None:
    """Offer an elementwise operator together with those before it; on CPU, whose caches are known.

    A forward operator so only again: the first time, its inputs exist.
    """
    value = view.node.meta["val"]
    if not view.runs_on_cpu or not value.is_floating_point() or not is_dense(value):
        return None
    offer = _implementation(view)
    if offer is None:
        return None
    gradient = offer.args[3]
    if offer.use == "again" or not view.fits_over(gradient, offer):
        return Extension((offer,))
    over = dataclasses.replace(
        offer, name=f"{offer.name}.over_argument_0", function=run_together_over, overwrites=gradient
    )
    return Extension((offer, over))


def _implementation(view: OpView) -> Implementation | None:
    chain = _Chain(view)
    chain.add(view.node)
    links = tuple(chain.links)
    if len(links) < 2 or not chain.is_regular():
        return None
    value = view.node.meta["val"]
    shape, strides = tuple(value.shape), tuple(value.stride())
    return Implementation(
        f"{view.op.target}.together_{len(links)}",
        run_together,
        (links, shape, strides, *chain.reads),
        exactness="bitwise" if _keeps_bits(links, shape, strides) else "rounding",
        use="again" if view.is_forward(view.node) else "any",
        rests_on=tuple(chain.rests_on),
        compiles=False,
        stretches=repr(links),
    )


def _keeps_bits(
    links: Sequence[Link | Norm], shape: tuple[int, ...], strides: tuple[int, ...]
) -> bool:
    functions = {link.function for link in links if isinstance(link, Link)}
    if functions <= _SAME_IN_VECTORS:
        return True
    *whole, _ = _stretches(shape, _outermost_first(strides))
    return all(_elements(shape, cuts) % _VECTORS == 0 for cuts in whole)


def _elements(shape: tuple[int, ...], cuts: tuple[Cut, ...]) -> int:
    lengths = {dimension: length for dimension, _, length in cuts}
    return math.prod(lengths.get(d, size) for d, size in enumerate(shape))


class _Chain:
    """An operator and those before it, as links."""

    def __init__(self, view: OpView) -> None:
        self._view = view
        self.links: list[Link | Norm] = []
        self.reads: list[fx.Node] = []
        self.rests_on: list[fx.Node] = []

    def add(self, node: fx.Node) -> Intermediate:
        """Add an elementwise operator, after the operators that make its arguments."""
        arguments = tuple(
            self._argument(node, argument) if isinstance(argument, fx.Node) else argument
            for argument in arguments_of(node)
        )
        keywords = tuple(node.kwargs.items())
        return self._link(Link(node.target, arguments, keywords))

    def is_regular(self) -> bool:
        """Whether every tensor is laid out as the result, or broadcast to it."""
        mine = self._view.node.meta["val"]
        for node in self.reads:
            value = node.meta["val"]
            if not isinstance(value, torch.Tensor):
                return False
            whole = value.shape == mine.shape
            if whole and value.stride() != mine.stride():
                return False
            if value.dtype != mine.dtype or (not whole and value.dim() not in (1, mine.dim())):
                return False
        return True

    def _argument(self, reader: fx.Node, node: fx.Node) -> Read | Intermediate:
        maker = self._maker(reader, node)
        if maker is None:
            return self._read(node)
        if maker.target is _NORM:
            return self._add_norm(maker)
        self.rests_on.append(maker)
        return self.add(maker)

    def _maker(self, reader: fx.Node, node: fx.Node) -> fx.Node | None:
        """Return the maker of an argument if it may be a link: the forward's only reader."""
        view = self._view
        maker = view.maker_of(node, (*_FORWARD, _NORM))
        mine, other = view.node.meta["val"], node.meta["val"]
        if maker is None or not view.is_forward(maker):
            return None
        if (other.shape, other.stride()) != (mine.shape, mine.stride()):
            return None
        forward = [user for user in node.users if view.is_forward(user)]
        if len(forward) > 1 and view.is_forward(reader):
            return None
        if maker.target is _NORM:
            picked = is_getitem(node) and node.args[1] == 0
            return maker if picked and statistics_of(view, maker) is not None else None
        return maker

    def _add_norm(self, norm: fx.Node) -> Intermediate:
        self.rests_on.append(norm)
        x, weight, bias, *_ = norm.args
        statistics = statistics_of(self._view, norm)
        tensors = (x, weight, bias, *(statistics or ()))
        reads = [self._read(t) if isinstance(t, fx.Node) else None for t in tensors]
        return self._link(Norm(*reads))  # type: ignore[arg-type]

    def _read(self, node: fx.Node) -> Read:
        if node not in self.reads:
            self.reads.append(node)
        return Read(self.reads.index(node))

    def _link(self, link: Link | Norm) -> Intermediate:
        self.links.append(link)
        return Intermediate(len(self.links) - 1)
