"""Outputs and mutations of a planned call, made from the results of its program.

AOTAutograd's runtime wrapper runs around the chain of autograd nodes. An output of the chain has a
history of its own. Views of inputs and of other outputs are made again outside of it, so that
autograd knows them as views.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.hooks import unserializable_hook

from tightfit.capture.joint_graph import JointGraph
from tightfit.capture.nodes import ancestors_of, base_of
from tightfit.execution import refused
from tightfit.torch_private import core as private
from tightfit.torch_private import engine
from tightfit.torch_private.wrappers import OutputType, TensorAlias, receives_gradient, wrapped

_OF_FUNCTION = OutputType.custom_function_view
"""The kind of a view that an autograd Function returns, with a history of its own."""
_OWN = (OutputType.non_alias, OutputType.unsafe_view_alias, _OF_FUNCTION)
"""Kinds of outputs that are no views of an input, of another output or of a result."""
_VIEWS = (OutputType.alias_of_intermediate, OutputType.alias_of_intermediate_save_as_output)
"""Kinds of outputs that are views of a further raw output."""
_VIEW_OF_OUTPUT = OutputType.alias_of_intermediate_base_is_user_output


class Returned:
    """Makes the outputs of one captured step.

    `chain`: runs the chain of nodes on the inputs and the arguments after them; returns the raw
    outputs by their positions. `canonical`: of each raw output that leaves the chain, the output
    that is returned in place of all that are the same. `plain`, `outside`: the raw outputs that
    leave the chain, each once, and all others. `viewed_inputs`: the inputs of which an autograd
    Function of the user returns views.
    """

    def __init__(self, joint: JointGraph, chain: Callable[[list[Any]], Mapping[int, Any]]) -> None:
        metadata = joint.metadata
        self._outputs = metadata.num_outputs
        self._bases = self._outputs + metadata.num_intermediate_bases
        infos = metadata.output_info
        changed = [metadata.input_info[i] for i in metadata.mutated_inp_runtime_indices]
        leaving = [i for i, info in enumerate(infos) if info.output_type in _OWN]
        leaving += range(self._outputs, self._bases)
        leaving += [self._bases + i for i, info in enumerate(changed) if info.mutates_data]
        receiving = {i for i, info in enumerate(infos) if receives_gradient(info)}
        receiving |= {*range(self._outputs, self._bases)}
        receiving |= {self._bases + i for i, info in enumerate(changed) if info.requires_grad}
        self._with_history = receiving.intersection(leaving)
        raw = joint.raw_outputs
        first: dict[fx.Node, int] = {}
        for i in sorted(leaving, key=lambda i: i not in receiving):
            if isinstance(raw[i], fx.Node):
                first.setdefault(raw[i], i)
        self.canonical = {i: first[raw[i]] for i in leaving if isinstance(raw[i], fx.Node)}
        self.plain = [i for i, same in self.canonical.items() if i == same]
        self.outside = [i for i in range(len(raw)) if self.canonical.get(i) != i]
        positions = {node: position for position, node in enumerate(joint.placeholders)}
        made = [i for i, info in enumerate(infos) if info.output_type is _OF_FUNCTION]
        bases = {i: base_of(raw[i]) for i in made}
        self._views_of_inputs = {i for i, base in bases.items() if base in positions}
        self.viewed_inputs = {positions[bases[i]] for i in self._views_of_inputs}
        self._aliases = frozenset(range(len(raw))) - frozenset(leaving)
        self._order = (*range(self._bases, len(raw)), *range(self._bases))
        self._is_simple = not self._aliases and all(i == s for i, s in self.canonical.items())
        self._fixed = [n for n, i in enumerate(self.plain) if not self.has_history(i)]
        self._without_history = [
            (i, info.output_type)
            for i, info in enumerate(infos)
            if info.requires_grad and not receives_gradient(info)
        ]
        self._chain = chain
        # where exactly the returned values leave the chain, the wrapper has nothing to do
        leaves_alone = self._is_simple and leaving == [*range(self._outputs)]
        self._call = self._run if leaves_alone else wrapped(self._run, metadata)

    def __call__(self, inputs: list[Any], *more: Any) -> list[Any]:
        """Return the flattened outputs of a call; change inputs as it does."""
        outputs = self._call([*inputs, *more])[: self._outputs]
        for i, kind in self._without_history:
            outputs[i] = _viewed_without_history(outputs[i], kind)
        return outputs

    def has_history(self, index: int) -> bool:
        """Whether a raw output that leaves the chain is differentiable."""
        return index in self._with_history

    def hidden(self, raw: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return values that leave the chain, as views only of values that leave it, too.

        A view of a tensor that is visible nowhere else is no view: the caller may write into it. A
        tensor without a history is no view of a tensor that gets a history. What an autograd
        Function returns of an input stays a view of it.
        """
        if not self._views_of_inputs and not any(t._is_view() for t in raw):
            return tuple(raw)
        roots = [id(private.viewed(t)) for t in raw]
        with_history = [self.has_history(i) for i in self.plain]
        sharing = Counter(root for root, has in zip(roots, with_history, strict=True) if has)
        return tuple(
            t.view_as(t)
            if i in self._views_of_inputs
            else t.detach()
            if t._is_view() and (sharing[root] == 1 if has else root in sharing)
            else t
            for i, t, root, has in zip(self.plain, raw, roots, with_history, strict=True)
        )

    def without_history(self, leaving: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the outputs of the chain that are not differentiable."""
        return [leaving[n] for n in self._fixed]

    def _run(self, given: list[Any]) -> list[Any]:
        raw = self._chain(given)
        if self._is_simple:
            return [raw[i] for i in self._order]
        return [self._handed_on(raw, i) for i in self._order]

    def _handed_on(self, raw: Mapping[int, Any], index: int) -> Any:
        if index in self._aliases:
            return TensorAlias(raw[index])
        same = self.canonical.get(index, index)
        return raw[same] if same == index or self.has_history(index) else raw[same].detach()


def viewed_outputs(joint: JointGraph) -> frozenset[int]:
    """Return the raw outputs whose gradients come from several outputs, as these are its views."""
    infos = [info for info in joint.metadata.output_info if receives_gradient(info)]
    outputs = joint.metadata.num_outputs
    further = Counter(outputs + i.base_idx for i in infos if i.output_type in _VIEWS)
    named = {i.base_idx for i in infos if i.output_type is _VIEW_OF_OUTPUT}
    return frozenset({i for i, views in further.items() if views > 1} | named)


def readers_of_outputs(joint: JointGraph) -> dict[int, frozenset[int]]:
    """Return for each differentiable output which of the others are computed from it.

    Nothing if none is: else gradients come inside of a step. What is a view of another output has
    no readers of its own.
    """
    infos = joint.metadata.output_info
    received = [i for i, info in enumerate(infos) if receives_gradient(info)]
    if len(received) == 1:
        return {}
    reads = {i: ancestors_of(joint.raw_outputs[i].all_input_nodes) for i in received}
    readers = {
        i: frozenset(j for j in received if joint.raw_outputs[i] in reads[j])
        if infos[i].output_type in _OWN
        else frozenset[int]()
        for i in received
    }
    return readers if any(readers.values()) else {}


def refuse_inner_parts(
    outputs: Sequence[torch.Tensor], readers: Mapping[int, frozenset[int]]
) -> None:
    """Refuse to give a part of a gradient where plain PyTorch gives all.

    All outputs leave one node of autograd's. Where gradients come to outputs that are computed from
    another, a hook on that one, and a derivative by it, would see the part from outside of the call
    only.

    `outputs`: of one call. `readers`: for each of them that may receive a gradient, the others that
    are computed from it.
    """
    _InnerParts(outputs, readers)  # its hooks hold it


class _InnerParts:
    """Notes which outputs of a call gradients come to; see `refuse_inner_parts`."""

    def __init__(
        self, outputs: Sequence[torch.Tensor], readers: Mapping[int, frozenset[int]]
    ) -> None:
        self._readers = readers
        self._read = {i: weakref.ref(outputs[i]) for i, others in readers.items() if others}
        self._hooks: dict[int, Mapping[int, Any]] = {}  # of each, also once the output is gone
        self._came: set[int] = set()
        self._backward = -1
        for i in sorted(readers, key=lambda i: len(readers[i])):  # the last computed first
            outputs[i].register_hook(self._noting(i))
            hooks = outputs[i]._backward_hooks
            assert hooks is not None
            self._hooks[i] = hooks

    def _noting(self, index: int) -> Callable[[Any], None]:
        def noting(gradient: torch.Tensor | None) -> None:
            if self._backward != engine.running_backward():
                self._backward, self._came = engine.running_backward(), set()
            if gradient is not None:
                self._came.add(index)
            if not self._came.isdisjoint(self._readers[index]) and self._is_looked_at(index):
                raise refused.looks_at_parts()

        return unserializable_hook(noting)  # else saving an output would warn of it

    def _is_looked_at(self, index: int) -> bool:
        """Whether a hook of the user sees an output's gradient, or a derivative by it is taken."""
        output = self._read[index]()
        if len(self._hooks[index]) > 1:
            return True
        return output is not None and (output.retains_grad or engine.is_differentiated_by(output))


def inputs_viewed(joint: JointGraph) -> frozenset[int]:
    """Return the placeholders of which outputs are views that a gradient goes through."""
    return frozenset(
        info.base_idx
        for info in joint.metadata.output_info
        if info.output_type is OutputType.alias_of_input and receives_gradient(info)
    )


def raw_outputs(joint: JointGraph, outputs: Sequence[Any]) -> dict[int, Any]:
    """Return the raw outputs with a history of their own, by position, of a forward's outputs.

    `outputs`: of the plain forward, flattened.
    """
    infos = joint.metadata.output_info
    found = {i: x for i, x in enumerate(outputs) if infos[i].output_type in _OWN}
    for info, output in zip(infos, outputs, strict=True):
        if info.output_type in _VIEWS:
            found[len(outputs) + info.base_idx] = private.viewed(output)
    return found


def _viewed_without_history(output: torch.Tensor, kind: OutputType) -> torch.Tensor:
    """Return an output that is a view, made without gradients, of a tensor with a history."""
    if kind in _OWN:
        return output.requires_grad_()
    if kind is OutputType.is_input:
        return output
    with torch.no_grad():
        return output.view_as(output)
