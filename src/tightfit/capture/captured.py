"""A captured step: the graph that is planned, and how each of its ops is run."""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import msgspec
import torch
from torch import fx, nn

from tightfit.capture.joint_graph import JointGraph
from tightfit.capture.side_effects.members import parameters_and_buffers
from tightfit.graph.ir import Alternative, Choice, Graph, Op, OpId, ValueId
from tightfit.graph.validate import validate_graph
from tightfit.torch_private import core as private
from tightfit.torch_private.storages import address_of

_NEAR = 1e-2  # of its bias: below, a single-precision weight leaves fewer than five digits


@dataclass(frozen=True)
class FarFromZero:
    """A condition of an alternative: no weight is near zero compared with its bias."""

    # weight, bias: placeholders; a bias may be None
    weight: fx.Node
    bias: fx.Node | None

    def holds(self, tensors: Mapping[fx.Node, Any], times: float = 1.0) -> bool:
        """Whether it is true of the tensors of some placeholders, with this margin."""
        if self.weight not in tensors or (self.bias is not None and self.bias not in tensors):
            return False
        with torch.no_grad():
            weight = tensors[self.weight].abs()
            other = weight if self.bias is None else weight.maximum(tensors[self.bias].abs())
            return bool((weight > other * (times * _NEAR)).all())

    def enforce(self, node: fx.Node, tensor: torch.Tensor) -> None:
        """Make it true of numbers that were drawn for one of the parameters."""
        if node is self.weight:
            tensor.abs_().add_(0.5)


@dataclass(frozen=True, eq=False, kw_only=True)  # a `Call` is equal only to itself
class Traits:
    """How an alternative of an op may be compared with the default, and when it may run."""

    # Ops of the trace whose results fit each other (the forward op of a backward op): where it is
    # compared with the default they run, and their inputs are drawn
    rests_on: tuple[fx.Node, ...] = ()
    compiles: bool = True  # whether it is of use to a compiler, which would unroll a loop over rows
    # Of one that runs on stretches of bounded size, element by element: a text that is equal for
    # those that compare and cost alike at any size
    stretches: str = ""
    # Whether each row of its results, and of the default's, depends on the same row of the inputs
    # only, for any number of rows. Then results that are equal on some rows are equal on all.
    by_rows: bool = False
    # A condition on parameters, checked in every step that may run it
    condition: FarFromZero | None = None

    @property
    def traits(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(Traits)}


@dataclass(frozen=True, eq=False)
class Call(Traits):
    """How one alternative of an op is run; equal only to itself."""

    function: Callable[..., Any]  # an ATen overload or any function of tensors
    # args, kwargs: arguments; an `fx.Node` in them means the value (or view) of that node
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[ValueId | None, ...]  # the value each output becomes; None: it is dropped
    is_tuple: bool  # whether the function returns a tuple

    def nodes(self) -> Iterator[fx.Node]:
        found: list[fx.Node] = []
        fx.map_arg((self.args, self.kwargs), found.append)
        yield from found


@dataclass(frozen=True)
class Captured:
    """A captured step: the planner's graph and how to run each part of it."""

    graph: Graph  # without costs
    joint: JointGraph  # the normalised trace
    calls: tuple[tuple[Call, ...], ...]  # for each op, one call for each alternative
    nodes: tuple[fx.Node, ...]  # the node each op came from
    # The value a base node (placeholder, op or getitem of an op) holds
    value_of: Mapping[fx.Node, ValueId]
    # The graph with alternatives, too, that only a larger budget has room to compare at their own
    # size: a refusal names the least budget by it. None: there are none.
    larger_budget_graph: Graph | None = None
    # The step with alternatives, too, that are still to be compared with their defaults: priced as
    # if they were as exact as they say. None: there are none.
    with_postponed: Captured | None = None
    # By placeholder: the placeholder whose gradient is handed over before. Autograd adds up the
    # gradients of one tensor in the order in which they come
    in_turn: Mapping[int, int] = field(default_factory=dict)
    plain: Captured | None = None  # the step before alternatives were added; None: it has none
    # Takes the optimizer's steps of parameters that are ops of the step; None: none are
    stepper: Any = None
    # Ops whose workspace there was no room to measure: it is predicted from other calls
    predicted: frozenset[OpId] = frozenset()

    @functools.cached_property
    def conditions(self) -> tuple[FarFromZero, ...]:
        """Conditions on parameters of the step's alternatives."""
        every = (call.condition for calls in self.calls for call in calls[1:])
        return tuple(dict.fromkeys(condition for condition in every if condition is not None))

    @functools.cached_property
    def readers(self) -> Mapping[ValueId, Sequence[OpId]]:
        """The ops whose first way reads a value, in order."""
        found: dict[ValueId, list[OpId]] = defaultdict(list)
        for op in self.graph.ops:
            for value in dict.fromkeys(op.alternatives[0].reads):
                found[value].append(op.id)
        return dict(found)

    @functools.cached_property
    def draws(self) -> bool:
        return any(op.random_state_bytes for op in self.graph.ops)

    def with_graph(self, graph: Graph) -> Captured:
        """Return the step with another graph of the same ops and values, such as a priced one."""
        return dataclasses.replace(self, graph=graph)

    @property
    def predicted_bytes(self) -> int:
        """The largest workspace that there was no room to measure."""
        ops = (self.graph.ops[op] for op in self.predicted)
        return max((op.alternatives[0].variants[0].workspace_bytes for op in ops), default=0)

    def with_predicted(self, times: float) -> Captured:
        """Return the step with other workspaces where there was no room to measure them.

        `times`: the factor; 0: they count as nothing.
        """
        if not self.predicted:
            return self
        ops = (_with_workspace(o, times) if o.id in self.predicted else o for o in self.graph.ops)
        return self.with_graph(msgspec.structs.replace(self.graph, ops=tuple(ops)))

    def keeping(self, is_kept: Callable[[Op, Alternative, Call], bool]) -> Captured:
        """Return the step without alternatives for which `is_kept` is false; defaults always stay.

        Of linked alternatives all go if one does.
        """
        kept = [
            [0, *(i for i in range(1, len(calls)) if is_kept(op, op.alternatives[i], calls[i]))]
            for op, calls in zip(self.graph.ops, self.calls, strict=True)
        ]
        choices: list[Choice] = []
        for choice in self.graph.choices:
            whole = [b for b in choice.branches if all(way in kept[op] for op, way in b)]
            for op, way in {p for b in choice.branches for p in b} - {p for b in whole for p in b}:
                kept[op] = [0, *(i for i in kept[op][1:] if i != way)]
            choices += [Choice(branches=tuple(whole))] if len(whole) > 1 else []
        moved = [{old: new for new, old in enumerate(indices)} for indices in kept]
        ops = tuple(
            msgspec.structs.replace(op, alternatives=tuple(op.alternatives[i] for i in indices))
            for op, indices in zip(self.graph.ops, kept, strict=True)
        )
        calls = tuple(
            tuple(own[i] for i in indices) for own, indices in zip(self.calls, kept, strict=True)
        )
        renumbered = tuple(
            Choice(
                branches=tuple(
                    tuple((op, moved[op][way]) for op, way in branch) for branch in choice.branches
                )
            )
            for choice in choices
        )
        graph = msgspec.structs.replace(self.graph, ops=ops, choices=renumbered)
        return dataclasses.replace(self, graph=validate_graph(graph), calls=calls)


def _with_workspace(op: Op, times: float) -> Op:
    def changed(way: Alternative) -> Alternative:
        sizes = (round(times * variant.workspace_bytes) for variant in way.variants)
        pairs = zip(way.variants, sizes, strict=True)
        variants = (msgspec.structs.replace(v, workspace_bytes=size) for v, size in pairs)
        return msgspec.structs.replace(way, variants=tuple(variants))

    return msgspec.structs.replace(op, alternatives=tuple(map(changed, op.alternatives)))


class StepGuards:
    """What a captured step depends on in addition to the signature of its call.

    It read values in Python. Where it writes parameters or buffers, it also depends on which of
    them share memory: a write into one shows in another.

    `leaves`, `modules`: inputs and modules of the call that was captured.
    """

    def __init__(
        self, joint: JointGraph, leaves: Sequence[Any], modules: Mapping[str, nn.Module]
    ) -> None:
        self._decisions = joint.decisions
        members = (i for i, s in enumerate(joint.sources) if s.kind in ("parameter", "buffer"))
        self._members = (*members,)
        written = {position for _, position in joint.write_backs}
        self._are_written = not written.isdisjoint(self._members)
        self._addresses: list[int] = []
        self._shared: tuple[int, ...] = ()
        if self._are_written:
            tensors = placeholder_tensors(joint, modules, leaves)
            self._addresses, self._shared = self._look(tensors), self._sharing(tensors)

    def hold(
        self,
        leaves: Sequence[Any],
        modules: Mapping[str, nn.Module],
        tensors: Callable[[], Sequence[Any]],
    ) -> bool:
        """Whether a call reads the same values, and its members share memory alike.

        `tensors`: returns the tensors of its placeholders.
        """
        return self._decisions.hold(leaves, modules) and self._share_alike(tensors)

    def _share_alike(self, tensors: Callable[[], Sequence[Any]]) -> bool:
        """Whether the same members share memory; looked at again where any has moved."""
        if not self._are_written:
            return True
        now = tensors()
        addresses = self._look(now)
        if addresses == self._addresses:
            return True
        if self._sharing(now) != self._shared:
            return False
        self._addresses = addresses
        return True

    def _look(self, tensors: Sequence[Any]) -> list[int]:
        return [*map(address_of, map(tensors.__getitem__, self._members))]

    def _sharing(self, tensors: Sequence[Any]) -> tuple[int, ...]:
        """Return of each member the first that shares its memory."""
        first: dict[int, int] = {}
        return tuple(first.setdefault(private.storage_key(tensors[i]), i) for i in self._members)


def placeholder_tensors(
    joint: JointGraph, modules: Mapping[str, nn.Module], leaves: Sequence[Any]
) -> list[Any]:
    """Return the tensors of the placeholders of a call, tangents left out.

    Parameters and buffers are fetched by name each time, so `.to()` and `load_state_dict(
    assign=True)` are seen.
    """
    members = {
        f"{prefix}.{name}": tensor
        for prefix, module in modules.items()
        for name, tensor in parameters_and_buffers(module).items()
    }
    return tensors_of(joint, leaves, members.__getitem__)


def parameters_of(joint: JointGraph, modules: Mapping[str, nn.Module]) -> dict[fx.Node, Any]:
    """Return the parameters that a step reads, by their placeholders."""
    members = {
        f"{prefix}.{key}": parameter
        for prefix, module in modules.items()
        for key, parameter in module.named_parameters(remove_duplicate=False)
    }
    pairs = zip(joint.placeholders, joint.sources, strict=True)
    return {n: members[s.name] for n, s in pairs if s.kind == "parameter" and s.name in members}


def tensors_of(joint: JointGraph, leaves: Sequence[Any], member: Callable[[str], Any]) -> list[Any]:
    """Return the tensors of the placeholders of a call, tangents left out.

    `leaves`: the call's flattened inputs. `member`: returns a parameter or buffer by its name.
    """
    return [
        leaves[source.index]
        if source.kind == "input"
        else private.viewed(leaves[source.index])
        if source.kind == "base"
        else member(source.name)
        for source in joint.sources
        if source.kind != "tangent"
    ]
