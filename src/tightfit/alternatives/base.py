"""The interface of contributors of operator alternatives: an `OpView` in, an `Extension` out.

A contributor is a function from an `OpView` to an `Extension` or None. It names tensors by the
nodes of the trace; which values these are, and which have to be alive, is worked out by the
registry.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx

from tightfit.capture.captured import Call, Captured, FarFromZero, Traits
from tightfit.capture.nodes import (
    base_of,
    fills_storage,
    is_getitem,
    is_traced_in_backward,
    storage_bytes,
)
from tightfit.graph.ir import Exactness, Op, OpId, Use, Value

_MARGIN = 4  # times the least of a condition: later steps are to fulfil it, too


@dataclass(frozen=True)
class Implementation(Traits):
    """One more implementation of an op: an alternative, before it is one of a graph."""

    name: str  # such as ``"relu.from_bits"``: family and variety
    # function, args, kwargs: the call: tensors are given by nodes of the trace, or of an `Extra`
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    # Which outputs of the default it makes: a tuple of them, one tensor, or (None) the same
    outputs: tuple[int, ...] | int | None = None
    # The argument whose storage the result takes over; it is gone afterwards
    overwrites: fx.Node | None = None
    use: Use = "any"  # ``"again"``: only for computing the op once more
    # How its bits compare with the default's. Tested on the device before it is used.
    exactness: Exactness = "bitwise"
    # Floating-point operations, for modelled costs; None: as many as the default
    flops: int | None = None


@dataclass(frozen=True)
class Extra:
    """An op that only alternatives read: a mask, say. Run only if such an alternative is chosen."""

    name: str  # such as ``"relu.bits"``
    # function, args: the call, behind the last of the ops it reads
    function: Callable[..., Any]
    args: tuple[Any, ...]
    node: fx.Node  # its result, in the arguments of a `Implementation`
    # Of a function that returns several tensors: a node for each
    results: tuple[fx.Node, ...] = ()
    # Further arguments with which it makes the same, as exact as the least of them
    others: tuple[tuple[Any, ...], ...] = ()
    flops: int = 0  # floating-point operations, for modelled costs
    compiles: bool = False  # as for a `Implementation`
    before: fx.Node | None = None  # it runs ahead of this op of the trace instead


@dataclass(frozen=True)
class Extension:
    """Further implementations of one op."""

    implementations: tuple[Implementation, ...]  # other than the default
    extras: tuple[Extra, ...] = ()  # their inputs that the trace does not make
    default_use: Literal["any", "first"] = "any"  # how the default may be used from now on
    unpins: bool = False  # whether the op may be recomputed now although its default may not
    # Operators that only the default reads: computed only if it is used
    optional: tuple[fx.Node, ...] = ()
    # Those that run instead of other ops if the first runs, and only then
    together: tuple[tuple[fx.Node, Implementation], ...] = ()
    # Those that may run instead of later ops, each by itself
    elsewhere: tuple[tuple[fx.Node, Implementation], ...] = ()


@dataclass(frozen=True)
class OpView:
    """One op of a captured step, as a contributor sees it."""

    captured: Captured  # the step, without alternatives
    op: Op
    implementations: tuple[Implementation, ...] = ()  # offered for it by other contributors so far
    # Parameters as they are now, by placeholder; None: unknown, any may be far from zero
    present: Mapping[fx.Node, torch.Tensor] | None = None

    @property
    def node(self) -> fx.Node:
        return self.captured.nodes[self.op.id]

    @property
    def call(self) -> Call:
        """How the default alternative is run."""
        return self.captured.calls[self.op.id][0]

    def call_of(self, node: fx.Node) -> Call:
        return self.captured.calls[self.captured.nodes.index(node)][0]

    @property
    def runs_on_cpu(self) -> bool:
        """Whether the op runs CPU kernels: only of those is it shown which give the same bits."""
        return self.captured.graph.device.kind == "cpu"

    def output_of(self, maker: fx.Node, index: int) -> fx.Node | None:
        """Return the node that picks an output of an op, if it is read."""
        picks = (user for user in maker.users if is_getitem(user))
        return next((pick for pick in picks if pick.args[1] == index), None)

    def is_forward(self, node: fx.Node) -> bool:
        return not is_traced_in_backward(node)

    def maker_of(self, node: Any, operators: Iterable[Any]) -> fx.Node | None:
        """Return the op that makes a tensor, if it is one of some operators and gives it whole."""
        if not isinstance(node, fx.Node):
            return None
        maker = node.args[0] if is_getitem(node) else node
        return maker if isinstance(maker, fx.Node) and maker.target in {*operators} else None

    def reader_of(self, node: Any, operators: Iterable[Any], *others: Any) -> fx.Node | None:
        """Return the first op of some operators whose arguments are a tensor and, then, `others`.

        So a backward op finds its forward: equal arguments make equal results, whichever it is.
        """
        wanted = {*operators}
        for user in node.users if isinstance(node, fx.Node) else ():
            if user.target in wanted and arguments_of(user)[: 1 + len(others)] == (node, *others):
                return user
        return None

    def may_rest_on_weights(self, weight: fx.Node | None, bias: fx.Node | None) -> bool:
        """Whether the weights of a norm are parameters, and well away from zero by now."""
        if any(node is not None and node.op != "placeholder" for node in (weight, bias)):
            return False
        if weight is None or self.present is None:
            return weight is not None or bias is None
        return FarFromZero(weight, bias).holds(self.present, times=_MARGIN)

    def value_of(self, node: fx.Node) -> Value | None:
        """Return the value that a tensor belongs to, None if it is a constant of the trace."""
        number = self.captured.value_of.get(base_of(node))
        return None if number is None else self.captured.graph.values[number]

    def may_take_over(self, node: fx.Node) -> bool:
        """Whether the op's result may take over the storage of an argument not kept elsewhere."""
        value = self.value_of(node)
        written = self.captured.graph.values[self.op.alternatives[0].writes[0]]
        return (
            value is not None
            and not value.is_constant
            and value.fate == "none"
            and value.size_bytes == written.size_bytes
        )

    def fits_over(self, target: Any, offer: Implementation) -> bool:
        """Whether a result, of the default's geometry, fits over one of its arguments.

        The argument has that geometry too, is all of its storage, and is read once.
        """
        if not isinstance(target, fx.Node) or base_of(target).op != "call_function":
            return False
        read: list[fx.Node] = []
        fx.map_arg((offer.args, offer.kwargs), read.append)
        mine, other = self.node.meta["val"], target.meta["val"]
        same = (
            isinstance(other, torch.Tensor)  # and not a number
            and mine.shape == other.shape
            and mine.stride() == other.stride()
            and mine.dtype == other.dtype
            and storage_bytes(mine) == other.numel() * other.element_size()
        )
        once = sum(base_of(n) is base_of(target) for n in read) == 1
        return same and once and self.may_take_over(target)

    def is_read_behind(self, node: fx.Node) -> bool:
        """Whether a tensor is kept, or read by a later op."""
        value = self.value_of(node)
        if value is None or value.is_constant or value.fate != "none":
            return True
        return any(op > self.op.id for op in self.captured.readers.get(value.id, ()))

    def read_backward(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """Return the operators of PyTorch that read a tensor in the backward, in order."""
        number = self.captured.value_of.get(base_of(node))
        if number is None:
            return ()
        return tuple(
            self.captured.nodes[op]
            for op in self.captured.readers.get(number, ())
            if op > self.op.id
            and self._is_backward(op)
            and hasattr(self.captured.calls[op][0].function, "_schema")
        )

    def is_kept_for_others(self, node: fx.Node) -> bool:
        """Whether a tensor is kept anyway: another op of the backward reads it, or user code."""
        base = base_of(node)
        number = self.captured.value_of.get(base)
        if number is None:
            return True
        value, readers = self.captured.graph.values[number], self.captured.readers.get(number, ())
        kept = value.is_constant or value.fate != "none"
        return kept or any(op != self.op.id and self._is_backward(op) for op in readers)

    def _is_backward(self, op: OpId) -> bool:
        graph = self.captured.graph
        return graph.segments[graph.ops[op].segment].phase == "backward"

    def extra(
        self,
        name: str,
        function: Callable[..., Any],
        *args: Any,
        others: tuple[tuple[Any, ...], ...] = (),
        flops: int = 0,
        compiles: bool = False,
        before: fx.Node | None = None,
        made: Any = None,
    ) -> Extra:
        """Return an op that only alternatives read.

        It is tried on fake tensors, to learn the sizes of its results, unless they are given:
        of large tensors in many stretches a trial takes seconds.
        """
        if made is None:
            made = self._tried(function, args)
        several = isinstance(made, tuple)
        node = fx.Graph().call_function(function)
        node.name = name.replace(".", "_")
        node.meta = {"val": made}
        results = tuple(_result(node, index) for index in range(len(made))) if several else ()
        return Extra(name, function, args, node, results, others, flops, compiles, before)

    def _tried(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        fakes = fx.map_arg(args, lambda n: n.meta["val"])
        mode = next(f.fake_mode for f in fakes if hasattr(f, "fake_mode"))
        with mode, torch.no_grad():
            return function(*fakes)


def slices(count: int, step: int) -> Iterator[slice]:
    """Yield slices of so many rows, `step` of them at a time; the last may be shorter."""
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def arguments_of(node: fx.Node) -> tuple[Any, ...]:
    """Return the positional arguments of an operator, those left at their default too."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return node.args
    rest = [a for a in schema.arguments[len(node.args) :] if not a.kwarg_only]
    return (*node.args, *(node.kwargs.get(a.name, a.default_value) for a in rest))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements of a (fake) tensor fill their storage, each at one place."""
    return tensor.numel() > 0 and fills_storage(tensor)


def _result(node: fx.Node, index: int) -> fx.Node:
    """Return a node for one of the tensors that a node makes."""
    result = node.graph.call_function(operator.getitem, (node, index))
    result.meta = {"val": node.meta["val"][index]}
    return result


Contributor = Callable[[OpView], Extension | None]
