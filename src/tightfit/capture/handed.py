"""Graphs that a tracer of Python has handed over, and their calls with inputs."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from tightfit.capture.calls.signature import refuse_subclass
from tightfit.capture.calls.structure import Arguments, flat_spec
from tightfit.capture.origins import module_names, note_module
from tightfit.errors import CaptureError, OpaqueVaries
from tightfit.torch_private import dynamo, recurrent
from tightfit.torch_private.frames.applied import apply_function, is_applied_function
from tightfit.torch_private.frames.examples import example_of


def stands_for_python(graph: fx.Graph) -> bool:
    """Whether operators of Dynamo's stand for code that plain PyTorch runs otherwise."""
    return any(dynamo.is_leaf_call(n) or is_applied_function(n) for n in graph.nodes)


@dataclass(frozen=True, eq=False)
class HandedGraph:
    """One graph of a callable: everything it uses is among its inputs."""

    module: fx.GraphModule  # runs the graph on its inputs; its output is a tuple
    numbers: tuple[int, ...] = ()  # which inputs are plain numbers that may be others in every call
    reason: str = ""  # why the callable goes on behind the graph; "" if it ends there
    # Tells the code it was made of, the same for all its graphs; "" if that is not known
    place: str = ""
    failed_guards: str = ""  # of the graphs that were made of this code before
    # The identity of the module in whose forward a node was made, where that is known
    modules: Mapping[fx.Node, int] = field(default_factory=dict)
    # Which of its outputs the callable returns along with a loss
    returned_with_loss: frozenset[int] = frozenset()
    # Inputs that it returns unchanged, by the output
    returned_inputs: Mapping[int, int] = field(default_factory=dict)

    @cached_property
    def called(self) -> tuple[Any, ...]:
        """Functions that its nodes call, as of now: they and methods of tensors may be replaced."""
        nodes = self.module.graph.nodes
        methods = (getattr(torch.Tensor, n.target, None) for n in nodes if n.op == "call_method")
        return (*(n.target for n in nodes if n.op == "call_function"), *methods)

    @cached_property
    def leaf_calls(self) -> tuple[fx.Node, ...]:
        """The calls of forwards that were not followed."""
        return tuple(n for n in self.module.graph.nodes if dynamo.is_leaf_call(n))

    @cached_property
    def hides_leaf_calls(self) -> bool:
        """Whether such calls are in a graph inside of it, such as a checkpoint's."""
        inside = (m for m in self.module.modules() if m is not self.module)
        graphs = (m.graph for m in inside if isinstance(m, fx.GraphModule))
        return any(dynamo.is_leaf_call(n) for graph in graphs for n in graph.nodes)

    @cached_property
    def recurrent_calls(self) -> Mapping[fx.Node, Sequence[fx.Node]]:
        """The calls of recurrent kernels with weights that the user's code computes, and these."""
        found = ((node, recurrent.weights_in(node)) for node in self.module.graph.nodes)
        return {node: weights for node, weights in found if weights is not None}

    def with_inputs(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> Sequence[Any]:
        """Return outputs of a call, with the inputs that are among them.

        AOTAutograd returns a view of an input that is written and shares memory with another.
        """
        if not self.returned_inputs:
            return outputs
        places = self.returned_inputs
        return [inputs[places[i]] if i in places else x for i, x in enumerate(outputs)]

    @property
    def calls_opaque(self) -> bool:
        """Whether it calls a module that no trace sees into."""
        return bool(self.leaf_calls or self.recurrent_calls)

    @cached_property
    def calls_python(self) -> bool:
        """Whether it runs node by node, so that such code runs as in plain PyTorch."""
        return stands_for_python(self.module.graph)

    def leaves(self) -> tuple[nn.Module, ...]:
        """Return the modules whose forwards they are, while a call of the graph is running."""
        return tuple(dynamo.leaf_of(self.module, n) for n in self.leaf_calls)

    def run_as_it_is(self, *inputs: Any) -> Any:
        """Run the graph without a plan, as plain PyTorch runs the callable."""
        if not self.calls_python:
            return self.module(*inputs)
        return _CallsPython(self).run(*inputs)


class _CallsPython(fx.Interpreter):
    """Runs a graph whose leaves and functions of autograd are called as Python calls them.

    The op that Dynamo put there refuses leaves that write to their buffers. It also makes gradients
    of parameters that a call did not use, which plain PyTorch does not.
    """

    def __init__(self, graph: HandedGraph) -> None:
        super().__init__(graph.module)
        self.extra_traceback = False
        self._leaves = dict(zip(graph.leaf_calls, graph.leaves(), strict=True))

    def run_node(self, n: fx.Node) -> Any:
        if is_applied_function(n):
            return apply_function(*self.fetch_args_kwargs_from_env(n))
        leaf = self._leaves.get(n)
        if leaf is None:
            return super().run_node(n)
        flat = self.fetch_args_kwargs_from_env(n)[0]
        return dynamo.run_leaf(self.module, n, leaf, flat)


class GraphArguments(Arguments, frozen=True):
    """The inputs of one call of a handed graph: members of modules are no arguments."""

    # All that the graph is called with, plain numbers as tensors; last the graph's own number
    inputs: Sequence[Any] = ()


@dataclass(frozen=True, eq=False)
class _Member:
    """An input of a graph that a module holds."""

    index: int
    module: nn.Module
    holder: str
    name: str

    def holds(self, tensor: Any) -> bool:
        return self.module.__dict__[self.holder].get(self.name) is tensor


@dataclass(frozen=True, eq=False)
class _Placed:
    """A graph with the parameters and buffers of certain modules.

    Modules of one class have one graph, which is called with the parameters of each.
    """

    number: int  # its own
    graph: HandedGraph  # to be run
    members: tuple[_Member, ...]  # which inputs modules hold
    rest: tuple[int, ...]  # the other inputs
    leaves: tuple[nn.Module, ...]  # those whose forwards are called as they are

    @cached_property
    def _held(self) -> tuple[tuple[dict[str, Any], ...], tuple[str, ...], tuple[int, ...]]:
        """The holder of each member, its name, and which input it is."""
        holders = tuple(m.module.__dict__[m.holder] for m in self.members)
        return holders, tuple(m.name for m in self.members), tuple(m.index for m in self.members)

    @cached_property
    def _parameters(self) -> tuple[int, ...]:
        """Which inputs are parameters of modules."""
        return tuple(m.index for m in self.members if m.holder == "_parameters")

    def serves(self, inputs: Sequence[Any], leaves: tuple[nn.Module, ...]) -> bool:
        """Whether a call of the graph has the same modules, with parameters of their own."""
        holders, names, places = self._held
        held = map(dict.get, holders, names)
        return (
            all(map(operator.is_, held, map(inputs.__getitem__, places)))
            and all(map(_IS_LEAF, map(inputs.__getitem__, self._parameters)))
            and leaves == self.leaves
        )

    def recurrent(self) -> dict[fx.Node, nn.RNNBase]:
        """Return the modules that call recurrent kernels: they hold one of the weights.

        Raises `CaptureError` if no module holds any of them, or the input is packed.
        """
        if not self.graph.recurrent_calls:
            return {}
        inputs = [n for n in self.graph.module.graph.nodes if n.op == "placeholder"]
        held = {inputs[m.index]: m.module for m in self.members}
        found: dict[fx.Node, nn.RNNBase] = {}
        for node, weights in self.graph.recurrent_calls.items():
            holders = (held[weight] for weight in weights if weight in held)
            module = next((m for m in holders if isinstance(m, nn.RNNBase)), None)
            if module is None:
                raise CaptureError(
                    "a recurrent module whose weights are all computed, or that is given a packed "
                    "sequence along with computed weights, cannot be planned"
                )
            found[node] = module
        return found


class HandedGraphs:
    """A callable of a graph's number and of its inputs, members of modules left out.

    So a step of any of the graphs is captured as a call of one function with these modules.

    `modules`: whose parameters and buffers the graphs use.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._placed: list[_Placed] = []
        self._by_graph: dict[HandedGraph, list[_Placed]] = {}

    def arguments(self, graph: HandedGraph, inputs: Sequence[Any]) -> GraphArguments:
        """Return the arguments for a call of a graph: its number comes last.

        Raises `CaptureError` if it takes a tensor whose class decides what operators do.
        """
        placed = self._place(graph, inputs)
        if graph.numbers:
            inputs = [_as_tensor(x) if i in graph.numbers else x for i, x in enumerate(inputs)]
        args = (*[inputs[i] for i in placed.rest], placed.number)
        return GraphArguments(args, {}, args, flat_spec(len(args)), (*inputs, placed.number))

    def is_as_it_was(self, given: GraphArguments) -> bool:
        """Whether modules hold the members that a call of a graph was given."""
        placed = self._placed[given.args[-1]]
        return placed.serves(given.inputs, placed.leaves)

    def modules_of(self, number: int) -> set[nn.Module]:
        """Return the modules whose parameters, buffers or forwards a graph takes."""
        placed = self._placed[number]
        return {*(member.module for member in placed.members), *placed.leaves}

    def leaves(self, number: int) -> tuple[nn.Module, ...]:
        """Return the modules whose forwards a graph calls though Dynamo has not traced them."""
        return self._placed[number].leaves

    def held(self, number: int) -> list[torch.Tensor | None]:
        """Return the members of modules that a graph or its leaves take, as they are held now."""
        placed = self._placed[number]
        members = [m.module.__dict__[m.holder].get(m.name) for m in placed.members]
        inner = (each for leaf in placed.leaves for each in (leaf.parameters(), leaf.buffers()))
        return [*members, *(tensor for tensors in inner for tensor in tensors)]

    def _place(self, graph: HandedGraph, inputs: Sequence[Any]) -> _Placed:
        known = self._by_graph.setdefault(graph, [])
        leaves = graph.leaves() if graph.leaf_calls else ()
        for placed in known:
            if placed.serves(inputs, leaves) and (placed.members or len(known) == 1):
                return placed
        for i, x in enumerate(inputs):
            if isinstance(x, torch.Tensor):
                refuse_subclass(x, f"input {i} of a graph")
        everywhere = self._members()
        found = [(i, *everywhere[id(x)]) for i, x in enumerate(inputs) if id(x) in everywhere]
        members = tuple(_Member(*each) for each in found)
        held = {member.index for member in members}
        rest = tuple(i for i in range(len(inputs)) if i not in held)
        placed = _Placed(len(self._placed), graph, members, rest, leaves)
        self._placed.append(placed)
        known.append(placed)
        return placed

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether a graph that was called takes a parameter or buffer."""
        return any(m.holds(tensor) for placed in self._placed for m in placed.members) or any(
            leaf_tensor is tensor
            for placed in self._placed
            for leaf in placed.leaves
            for leaf_tensor in leaf.parameters()
        )

    def has_numbers(self, number: int) -> bool:
        """Whether a graph takes plain numbers: `arguments` makes tensors of them."""
        return bool(self._placed[number].graph.numbers)

    def __call__(self, *given: Any) -> Any:
        """Run a graph, with the parameters and buffers that the modules hold now."""
        *rest, number = given
        placed = self._placed[number]
        inputs = dict(zip(placed.rest, rest, strict=True))
        inputs |= {m.index: getattr(m.module, m.name) for m in placed.members}
        inputs |= {i: inputs[i].item() for i in placed.graph.numbers}
        names = {id(module): name for name, module in module_names(self._modules).items()}
        return _Named(placed, names).run(*(inputs[i] for i in range(len(inputs))))

    def graph(self, number: int) -> HandedGraph:
        return self._placed[number].graph

    def places(self, number: int) -> tuple[Any, ...]:
        """Return which inputs of a graph are members of modules, and the modules of its nodes."""
        placed = self._placed[number]
        names = {id(module): name for name, module in module_names(self._modules).items()}
        members = ((m.index, names[id(m.module)], m.holder, m.name) for m in placed.members)
        made_in = ((n.name, names.get(made, "")) for n, made in placed.graph.modules.items())
        return (*members, *made_in)

    def _members(self) -> dict[int, tuple[nn.Module, str, str]]:
        """Return the place of each parameter and buffer, by its identity.

        A tensor that replaces a parameter during one call (`torch.func.functional_call`) and was
        computed is no parameter: modules hold another tensor afterwards.
        """
        return {
            id(tensor): (module, holder, name)
            for top in self._modules.values()
            for module in top.modules()
            for holder in ("_buffers", "_parameters")
            for name, tensor in module.__dict__[holder].items()
            if tensor is not None and (holder == "_buffers" or tensor.is_leaf)
        }


_IS_LEAF = operator.attrgetter("is_leaf")


def _as_tensor(number: Any) -> torch.Tensor:
    """Return a plain number as a tensor that holds it exactly."""
    return torch.tensor(number, dtype=torch.float64 if isinstance(number, float) else torch.int64)


def takes_numbers(function: Any, args: Sequence[Any]) -> bool:
    """Whether a call runs a handed graph that takes numbers which may change."""
    return isinstance(function, HandedGraphs) and function.has_numbers(args[-1])


def returned_with_loss(function: Any, args: Sequence[Any]) -> frozenset[int]:
    """Return which outputs of a call of a handed graph its callable returns along with a loss."""
    graph = function.graph(args[-1]) if isinstance(function, HandedGraphs) else None
    return graph.returned_with_loss if graph is not None else frozenset()


def is_handed(function: Any) -> bool:
    """Whether a callable runs handed graphs."""
    return isinstance(function, HandedGraphs)


class _Named(fx.Interpreter):
    """Runs a graph node by node, and says in which module each node was made."""

    def __init__(self, placed: _Placed, names: Mapping[int, str]) -> None:
        graph = placed.graph
        super().__init__(graph.module)
        self.extra_traceback = False
        self._made_in = {n: names[m] for n, m in graph.modules.items() if m in names}
        self._leaves = dict(zip(graph.leaf_calls, placed.leaves, strict=True))
        self._recurrent = placed.recurrent()

    def run_node(self, n: fx.Node) -> Any:
        if n.op not in ("placeholder", "output"):
            note_module(self._made_in.get(n, ""))
        if n in self._leaves:
            flat = self.fetch_args_kwargs_from_env(n)[0]
            returned = dynamo.run_leaf(self.module, n, self._leaves[n], flat)
            self._refuse_other_sizes(n, returned)
            return returned
        if n in self._recurrent:
            args = self.fetch_args_kwargs_from_env(n)[0]
            return recurrent.run_kernel(self._recurrent[n], args)
        return super().run_node(n)

    def _refuse_other_sizes(self, node: fx.Node, returned: tuple[Any, ...]) -> None:
        """Refuse outputs of a leaf if Python was followed for other sizes.

        Raises `OpaqueVaries` if data decide how large it is.
        """
        expected = example_of(node)
        for mine, known in zip(returned, expected, strict=True):
            if isinstance(mine, torch.Tensor) and mine.shape != known.shape:
                name = self._made_in.get(node, "")
                raise OpaqueVaries(
                    f"the opaque module {name!r} returns tensors of {tuple(mine.shape)} here and "
                    f"of {tuple(known.shape)} for other values: its output depends on the data, "
                    "which a plan cannot hold. Way out: pad to a fixed shape, or move it out of "
                    "the fitted part",
                    module=name,
                )
