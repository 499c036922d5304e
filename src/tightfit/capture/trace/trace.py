"""Trace one training step of a callable into a joint forward+backward ATen graph.

`aot_export_joint_with_descriptors` traces it on fake tensors, with no decompositions: nothing is
computed, and nothing is allocated. The result is functional: mutations have become outputs. The
descriptor of each placeholder and output tells its meaning.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from tightfit.capture.calls.structure import Structure, flatten, opened, structure_of
from tightfit.capture.decisions.numbers import Numbers, is_carried
from tightfit.capture.decisions.recorder import DecisionRecorder
from tightfit.capture.decisions.shared import shared_views
from tightfit.capture.handed import returned_with_loss
from tightfit.capture.joint_graph import JointGraph, Source
from tightfit.capture.nodes import (
    is_traced_in_backward,
    is_without_gaps,
    note_kept_forward,
    note_random,
    note_terms,
)
from tightfit.capture.opaque.tracing import OpaqueStandIns, draws_inside, is_opaque_operator
from tightfit.capture.operators.checkpoints import SeenCheckpoints
from tightfit.capture.operators.linalg import is_check
from tightfit.capture.operators.masks import MaskedAssignments
from tightfit.capture.operators.products import TracedProducts
from tightfit.capture.operators.registry import traced_operators
from tightfit.capture.origins import CastRegions, ModuleTrail, Origins
from tightfit.capture.side_effects.backward_writes import refuse_backward_writes
from tightfit.capture.side_effects.members import RepeatedMembers
from tightfit.capture.side_effects.saving import refuse_saving_hooks
from tightfit.capture.side_effects.tied import TiedTensors
from tightfit.capture.trace.asked import AskedGradients
from tightfit.capture.trace.errors import explained
from tightfit.capture.trace.in_place import LayoutsInPlace
from tightfit.capture.trace.strides import TrueStrides, note_calls, with_true_strides
from tightfit.capture.traced_call import TracedCall
from tightfit.errors import CaptureError
from tightfit.torch_private import core as private
from tightfit.torch_private import traces, wrappers
from tightfit.torch_private.saving import watched_checkpoints
from tightfit.torch_private.tracing.fake_kernels import corrected_fake_kernels
from tightfit.torch_private.tracing.trees import quick_functionalisation

_COMMUNICATION = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})


class _Callee(nn.Module):
    """Gives a callable and its modules the face of one module, as the tracer wants it."""

    def __init__(
        self, call: TracedCall, opaque: OpaqueStandIns, recorder: DecisionRecorder
    ) -> None:
        super().__init__()
        self._recorder = recorder
        # not as an attribute: a module given as the function would be registered twice
        object.__setattr__(self, "_function", call.function)
        self.detached = call.detached_outputs
        self._loss_alone = call.loss_alone
        self._inputs = (call.args, call.kwargs)
        self._opaque = opaque
        self.structure: Structure | None = None
        self._keeps_casts = torch.is_autocast_cache_enabled()
        self._traced_parameters: dict[int, Any] = {}
        for name, module in call.modules.items():
            self.add_module(name, _without_scripts(module))
        self._tied = TiedTensors(self)
        self.asked = AskedGradients()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the callable; hooks of all modules are not for this module, which is not the
        user's."""
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the callable on the tracer's stand-ins for inputs; return the tensors it makes."""
        with self._tied.joined():
            return self._traced(args, kwargs)

    def _traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        self._opaque.note_inputs((args, kwargs), self._inputs)
        children = dict(self.named_children())
        self._recorder.start(flatten((args, kwargs))[0], children)
        self.asked.begin()
        self._traced_parameters = {id(p): p for p in self.parameters()}
        for parameter in self._traced_parameters.values():
            private.call_parameter(parameter)
        with (
            torch.autograd.set_detect_anomaly(False),  # the tracer notes a stack for each operator
            private.autocast_cache(self._keeps_casts),
            self._recorder,
            MaskedAssignments(),
            TracedProducts(),
        ):
            output = self._function(*args, **kwargs)
            self._recorder.refuse_seeding()
        self._opaque.note_overwritten()
        tensors, self.structure = structure_of(output, "the call")
        if self._loss_alone:
            extra = returned_with_loss(self._function, self._inputs[0])
            self.detached |= {i for i in extra if tensors[i].requires_grad}
        self.asked.expect(tensors, self.detached)
        return tuple(tensors)

    def is_parameter(self, tensor: Any) -> bool:
        """Whether a tensor stood for a parameter when the forward was last traced."""
        return id(tensor) in self._traced_parameters


def _without_scripts(module: nn.Module) -> nn.Module:
    """Return a module without the scripted ones in it, whose members no tracer can swap."""
    if not any(isinstance(m, torch.jit.ScriptModule) for m in module.modules()):
        return module
    face = nn.Module()
    face.__dict__.update(_parameters=module._parameters, _buffers=module._buffers)
    for name, child in module.named_children():
        if not isinstance(child, torch.jit.ScriptModule):
            face.add_module(name, _without_scripts(child))
    return face


def trace(
    call: TracedCall, strides: TrueStrides | None = None, numbers: Numbers | None = None
) -> JointGraph:
    """Trace the step of a call on fake tensors; only opaque modules run once, to be measured.

    `call`: the callable with its modules and example inputs (real or fake tensors). `strides`:
    of results for which fake kernels give wrong strides. `numbers`: takes numbers that are read
    as inputs of the step. Raises `CaptureError` if the tracer cannot follow the call: it
    branches on data, has outputs of unknown shape, or uses tensors that are no parameter, buffer or
    input, for example. The error names the module that was running.
    """
    trail = ModuleTrail(call.modules)
    regions = CastRegions()
    refuse_saving_hooks()
    with explained(trail), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        leaves = call.leaves
        recorder = DecisionRecorder(leaves, call.modules, trail, numbers)
        opaque = OpaqueStandIns(call.modules, recorder.known_value)
        callee = _Callee(call, opaque, recorder)
        checkpoints = SeenCheckpoints()
        with contextlib.ExitStack() as stack:
            stack.enter_context(private.without_open_transforms())
            stack.enter_context(private.keep_composites_whole())
            stack.enter_context(traces.lazy_modules())
            stack.enter_context(corrected_fake_kernels())
            stack.enter_context(quick_functionalisation())
            stack.enter_context(with_true_strides(strides or {}))
            stack.enter_context(private.backward_without_autocast())
            stack.enter_context(private.hidden_changes_without_tangents(callee.is_parameter))
            stack.enter_context(wrappers.marking_gradient_receivers())
            stack.enter_context(traced_operators())
            stack.enter_context(watched_checkpoints(checkpoints.note))
            stack.enter_context(trail)
            stack.enter_context(regions)
            stack.enter_context(RepeatedMembers(call.modules))
            stack.enter_context(opaque)
            stack.enter_context(callee.asked)
            stack.enter_context(LayoutsInPlace())
            if numbers is not None:
                stack.enter_context(private.symbolic_numbers())
                stack.enter_context(numbers)
            args, kwargs = opened((call.args, call.kwargs))
            joint = private.aot_export_joint_with_descriptors(stack, callee, args, kwargs)
        traces.forget_real_tensors(n.meta.get("val") for n in joint.graph_module.graph.nodes)
    assert callee.structure is not None
    kept = {
        "structure": callee.structure,
        "origins": Origins(trail.names(), regions.regions()),
        "decisions": recorder.decisions(),
        "opaque": opaque.found(),
        "detached": callee.detached,
        "checkpoints": checkpoints.found,
    }
    return _with_histories(_with_shared_views(_read(joint, kept, callee.asked), leaves), leaves)


def _read(joint: Any, kept: dict[str, Any], asked: AskedGradients) -> JointGraph:
    module: fx.GraphModule = joint.graph_module
    _refuse_communication(module, kept["origins"])
    note_calls(module.graph)
    _note_random(module.graph)
    _number_sums(module.graph)
    metadata = wrappers.metadata_of(joint)
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    outputs = _outputs_of(joint, placeholders, asked)
    handed_over = (node for node, _ in (*outputs.raw, *outputs.write_backs))
    refuse_backward_writes(module, handed_over)
    placeholders = _without_tangents(module.graph, placeholders, asked.receives)
    return JointGraph(
        module=module,
        placeholders=tuple(placeholders),
        sources=tuple(_sources(placeholders, [descriptor for _, descriptor in outputs.raw])),
        write_backs=tuple(outputs.write_backs),
        raw_outputs=tuple(node for node, _ in outputs.raw),
        metadata=wrappers.runtime_metadata(metadata, outputs.inside),
        gradients=tuple(outputs.gradients),
        **kept,
    )


@dataclass
class _Outputs:
    """The outputs of a traced step, by purpose; positions are places among the placeholders."""

    raw: list[tuple[Any, Any]] = field(default_factory=list)  # of the callable, with descriptors
    write_backs: list[tuple[fx.Node, int]] = field(default_factory=list)
    inside: set[int] = field(default_factory=set)  # inputs that write-backs alone change
    gradients: list[tuple[fx.Node, int]] = field(default_factory=list)


def _outputs_of(joint: Any, placeholders: Sequence[fx.Node], asked: AskedGradients) -> _Outputs:
    """Return the outputs by purpose; changed inputs come last among the raw outputs."""
    output_node = joint.graph_module.graph.output_node()
    flat = list(private.pytree.arg_tree_leaves(*output_node.args))
    descriptors = list(output_node.meta["desc"])
    position = {n.meta["desc"]: i for i, n in enumerate(placeholders)}
    outputs = _Outputs()
    changed: list[tuple[Any, Any]] = []
    count = iter(asked.terms)
    for node, descriptor in zip(flat, descriptors, strict=True):
        match descriptor:
            case private.InputMutationAOTOutput(given):
                place = position[given]
                writes, left = _change_of(joint, placeholders[place], node, place)
                if writes:
                    outputs.write_backs.append((node, place))
                if left is None:
                    outputs.inside.add(place)
                else:
                    changed.append((left, descriptor))
            case private.PlainAOTOutput() | private.IntermediateBaseAOTOutput():
                outputs.raw.append((node, descriptor))
            case private.GradAOTOutput():
                arriving = next(count)
                if node is not None:
                    outputs.gradients.append((node, position[descriptor.grad_of]))
                    note_terms(node, arriving)
            case private.MetadataMutationAOTOutput():
                raise CaptureError(
                    "the step changes the shape of an input that shares its memory with another "
                    "input, and writes into it. Way out: pass a clone of it"
                )
            case None:
                pass
            case _:
                raise CaptureError(
                    f"the traced step has an output of an unknown kind ({descriptor}); please "
                    "report this with the model"
                )
    outputs.raw += changed
    return outputs


def _with_histories(joint: JointGraph, leaves: Sequence[Any]) -> JointGraph:
    """Note the inputs that autograd has made."""
    made = {i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and not x.is_leaf}
    sources = (
        replace(source, has_history=source.kind == "input" and source.index in made)
        for source in joint.sources
    )
    return replace(joint, sources=tuple(sources))


def _with_shared_views(joint: JointGraph, leaves: Sequence[Any]) -> JointGraph:
    """Note the positions in one tensor of inputs changed together: the trace holds for that."""
    bases = [source.index for source in joint.sources if source.kind == "base"]
    if not bases:
        return joint
    shared = tuple(shared_views(leaves, index) for index in bases)
    return replace(joint, decisions=replace(joint.decisions, shared=shared))


def _note_random(graph: fx.Graph) -> None:
    """Note which of our own operators draw: their schemas are tagged so that none is dropped."""
    for node in graph.nodes:
        if is_opaque_operator(node):
            note_random(node, draws_inside(node))
        elif is_carried(node) or is_check(node):
            note_random(node, False)
        if is_check(node) and not is_traced_in_backward(node):
            note_kept_forward(node)


def _number_sums(graph: fx.Graph) -> None:
    """Let a sum of gradients come from the module whose gradient it waited for.

    Autograd sums between two of its operators, and these sums are given the last number of the
    forward: that of the module that ran last. Backward counts down from that number, so a number
    that jumps back to the end belongs to a sum.
    """
    numbered = [node for node in graph.nodes if node.meta.get("seq_nr") is not None]
    last = max((n.meta["seq_nr"] for n in numbered if not is_traced_in_backward(n)), default=0)
    before = float("inf")
    for node in filter(is_traced_in_backward, numbered):
        if last <= node.meta["seq_nr"] > before:
            node.meta["seq_nr"] = before
        before = node.meta["seq_nr"]


def _refuse_communication(module: fx.GraphModule, origins: Origins) -> None:
    """Refuse collectives: called in place, they are wrapped so that their order is kept."""
    for node in module.graph.nodes:
        for called in (node.target, *node.args):
            if getattr(called, "namespace", "") in _COMMUNICATION:
                where = origins.module_at(node.meta.get("seq_nr"))
                raise CaptureError(
                    f"module {where!r} communicates with other processes ({called}): a "
                    "plan cannot hold that. Way out: communicate outside the fitted part"
                )


def _without_tangents(
    graph: fx.Graph, placeholders: Sequence[fx.Node], receives: Sequence[bool]
) -> list[fx.Node]:
    """Erase the gradients of outputs that are known to receive none: they are not read."""
    tangents = [n for n in placeholders if isinstance(n.meta["desc"], private.TangentAOTInput)]
    unread = {node for node, may in zip(tangents, receives, strict=True) if not may}
    for node in unread:
        graph.erase_node(node)
    return [node for node in placeholders if node not in unread]


def _change_of(
    joint: Any, before: fx.Node, after: fx.Node, place: int
) -> tuple[bool, fx.Node | None]:
    """Return whether a step writes into an input, and the data for AOTAutograd's wrapper.

    `before`, `after`: the input as it is given, and as it is left. `place`: its place among the
    placeholders. Raises `CaptureError` if that cannot be done as plain PyTorch does it.
    """
    info = wrappers.metadata_of(joint).input_info[place]
    given = before.meta["desc"]
    is_base = isinstance(given, private.ViewBaseAOTInput)
    is_input = is_base or isinstance(given, private.PlainAOTInput)
    if not info.mutates_data:
        return False, after
    if is_base and info.requires_grad and not wrappers.takes_gradient(joint, place):
        raise CaptureError(
            "the step writes a tensor that requires a gradient into an input that does not, and "
            "that shares its memory with another input. Way out: pass a clone of it"
        )
    old, new = before.meta["val"], after.meta["val"]
    if is_input and old.shape != new.shape and not is_without_gaps(old):
        raise CaptureError(
            f"the step changes the shape of an input and writes into it, whose {tuple(old.shape)} "
            "elements are not side by side: where they would be written cannot be planned. Way "
            "out: pass a contiguous copy of it"
        )
    is_handed_on = info.requires_grad or (info.mutates_metadata and is_input)
    return True, before if is_handed_on else None


def _sources(placeholders: Sequence[fx.Node], raw: Sequence[Any]) -> list[Source]:
    """Return where placeholders come from.

    `raw`: the descriptors of the raw outputs.
    """
    sources = []
    for node in placeholders:
        descriptor = node.meta["desc"]
        match descriptor:
            case private.ParamAOTInput():
                sources.append(Source("parameter", descriptor.target))
            case private.BufferAOTInput():
                sources.append(Source("buffer", descriptor.target))
            case private.PlainAOTInput():
                sources.append(Source("input", f"input {descriptor.idx}", descriptor.idx))
            case private.ViewBaseAOTInput(private.PlainAOTInput(place)):
                sources.append(Source("base", f"what input {place} is a view of", place))
            case private.TangentAOTInput():
                index = raw.index(descriptor.output)
                sources.append(Source("tangent", f"tangent {index}", index))
            case _:
                raise CaptureError(
                    f"the traced step has an input of an unknown kind ({descriptor}): tensor "
                    "subclasses and inputs that share memory are not supported yet; pass plain, "
                    "separate tensors"
                )
    return sources
