"""Trace one training step of a callable into a joint forward+backward ATen graph.

Route B of the study: `aot_export_joint_with_descriptors`, undecomposed, under fake tensors, so
that nothing is computed and nothing is allocated. The result is functional: mutations have become
outputs, and what each placeholder and output means is known from its descriptor.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from tightfit.capture.assignments import DataAssignments, members_of, write_replaced
from tightfit.capture.calls.structure import Structure, flatten, opened, structure_of
from tightfit.capture.decisions.answers import Answer, Question
from tightfit.capture.decisions.reads import Decisions
from tightfit.capture.decisions.recorder import DecisionRecorder
from tightfit.capture.opaque.tracing import OpaqueCalls
from tightfit.capture.operators.numbers import NumbersAskedFor
from tightfit.capture.operators.registry import traced_operators
from tightfit.capture.origins import ModuleTrail, RepeatedMembers
from tightfit.capture.rearranged import refuse_rearranged
from tightfit.capture.regions import CastRegions
from tightfit.capture.side_effects.outside import PREFIX, OutsideTensors
from tightfit.capture.trace.errors import explained
from tightfit.capture.trace.strides import Layouts, note_calls, true_layouts
from tightfit.costs.measured.call import PeakFunction
from tightfit.errors import CaptureError
from tightfit.torch_private import core as private
from tightfit.torch_private.fake_kernels import corrected_fake_kernels

__all__ = ["JointGraph", "OutputInfo", "Source", "TracedCall", "trace"]

_COMMUNICATION = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})


@dataclass(frozen=True)
class Source:
    """Where the tensor of a placeholder comes from.

    Parameters
    ----------
    kind : str
        ``"parameter"``, ``"buffer"``, ``"input"`` or ``"tangent"``.
    name : str
        Qualified name of a parameter or buffer; ``"input 3"`` or ``"tangent 0"`` otherwise.
    index : int
        Position among the flattened inputs, or (tangents) among the raw outputs; -1 otherwise.
    """

    kind: str
    name: str
    index: int = -1


@dataclass(frozen=True)
class OutputInfo:
    """How one output tensor of the traced call is made from the raw outputs.

    Parameters
    ----------
    kind : str
        ``"plain"``: a raw output as it is. ``"input"``: one of the inputs itself.
        ``"alias_of_input"``, ``"alias_of_output"``: a view, made anew outside the program.
    base : int
        For aliases: position of the input among the placeholders, or of the raw output.
    requires_grad : bool
        Whether it takes part in differentiation. An output that is known to receive no gradient
        is traced without, but still leaves as one that requires a gradient, as in eager; should
        it receive one after all, the step refuses clearly.
    """

    kind: str
    base: int = -1
    requires_grad: bool = False


@dataclass(frozen=True)
class TracedCall:
    """What is traced: a callable, the modules whose parameters it uses, example inputs.

    Parameters
    ----------
    function : callable
        The model's own forward, or a function of the inputs.
    modules : dict of str to nn.Module
        The modules whose parameters it uses.
    args, kwargs
        Real or fake.
    detached_outputs : frozenset of int
        Flattened outputs known to receive no gradient.
    opaque : frozenset of str
        Names of modules to run as one op, besides those marked by `tightfit.opaque`.
    answers : tuple of Answer, optional
        What the forward was told about computed values when it really ran; see `probe`.
    answered : frozenset of str
        The inner modules for which these answers hold, besides the outermost.
    examples : dict of str to list
        For opaque modules: the flattened arguments of each call when it really ran, as far as
        their values may decide something.
    outside : OutsideTensors, optional
        Tensors it uses that are neither parameter, buffer nor input.
    """

    function: Callable[..., Any]
    modules: dict[str, nn.Module]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    detached_outputs: frozenset[int] = frozenset()
    opaque: frozenset[str] = frozenset()
    answers: tuple[Answer, ...] | None = None
    answered: frozenset[str] = frozenset()
    examples: Mapping[str, Sequence[Sequence[Any]]] = field(default_factory=dict)
    outside: OutsideTensors | None = None

    @property
    def owners(self) -> dict[str, nn.Module]:
        """The modules, and the one that holds outside tensors if there are any."""
        if self.outside is None:
            return self.modules
        return {**self.modules, PREFIX: self.outside.holder}


@dataclass(frozen=True)
class JointGraph:
    """A traced step.

    Parameters
    ----------
    module : torch.fx.GraphModule
        Placeholders (in the order of `sources`), operators, one output node.
    placeholders : list of node
        The input nodes.
    sources : list of Source
        One for each placeholder.
    write_backs : list of (node, int)
        New content and the placeholder position of each mutated buffer or input.
    raw_outputs : list of node or constant
        Tensor outputs and, after them, bases that several outputs view.
    outputs : list of OutputInfo
        How each flattened output follows from the raw ones.
    gradients : list of (node, int)
        Gradient and the placeholder position of what it is the gradient of.
    structure : Structure
        The call's output without its tensors.
    trail : ModuleTrail
        Which module was running at which autograd sequence number.
    decisions : Decisions
        The values the step read in Python: the trace holds as long as they are the same.
    questions : tuple of Question
        The ops of the step that check what else it read.
    answers : tuple of Answer, optional
        What the call was told for which the step was traced, if anything was computed.
    outside : dict of str to nn.Module
        What holds tensors that belong to no module of the call, if it uses any.
    opaque : OpaqueCalls
        Keeps the modules that run as one op.
    regions : CastRegions
        Where autocast kept the casts of weights.
    """

    module: fx.GraphModule
    placeholders: list[fx.Node]
    sources: list[Source]
    write_backs: list[tuple[fx.Node, int]]
    raw_outputs: list[Any]
    outputs: list[OutputInfo]
    gradients: list[tuple[fx.Node, int]]
    structure: Structure
    trail: ModuleTrail
    decisions: Decisions
    questions: tuple[Question, ...]
    answers: tuple[Answer, ...] | None
    outside: dict[str, nn.Module]
    opaque: OpaqueCalls
    regions: CastRegions


class _Callee(nn.Module):
    """Gives a callable and its modules the face of one module, as the tracer wants it."""

    def __init__(self, call: TracedCall, opaque: OpaqueCalls, recorder: DecisionRecorder) -> None:
        super().__init__()
        self._recorder = recorder
        # not as an attribute: a module given as the function would be registered twice
        object.__setattr__(self, "_function", call.function)
        self._detached = call.detached_outputs
        self._inputs = (call.args, call.kwargs)
        self._opaque = opaque
        self._replacing = call.outside
        self.structure: Structure | None = None
        self._keeps_casts = torch.is_autocast_cache_enabled()
        self.repeated = RepeatedMembers(call.modules)
        self._traced_parameters: dict[int, Any] = {}
        for name, module in call.owners.items():
            self.add_module(name, module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        before = self.repeated.now()
        self._opaque.note_inputs((args, kwargs), self._inputs)
        children = dict(self.named_children())
        leaves, spec = flatten((args, kwargs))
        self._recorder.start(leaves, children)
        if self._replacing is not None:
            self._replacing.start(children[PREFIX])
        members = members_of(self)
        self._traced_parameters = {id(p): p for p in self.parameters()}
        outside = self._replacing or contextlib.nullcontext()
        assigned, lists = DataAssignments(), NumbersAskedFor(tracing=True)
        with private.autocast_cache(self._keeps_casts), self._recorder, outside, assigned, lists:
            output = self._function(*args, **kwargs)
        write_replaced(self, members)
        refuse_rearranged((leaves, spec), flatten((args, kwargs)))
        self.repeated.note_changes(before)
        tensors, self.structure = structure_of(output, "the call")
        return tuple(t.detach() if i in self._detached else t for i, t in enumerate(tensors))

    def is_parameter(self, tensor: Any) -> bool:
        """Whether a tensor stood for a parameter when the forward was last traced."""
        return id(tensor) in self._traced_parameters


def trace(
    call: TracedCall, measure_peak: PeakFunction | None = None, layouts: Layouts | None = None
) -> JointGraph:
    """Trace the step of a call on fake tensors.

    Parameters
    ----------
    call : TracedCall
        The callable with its modules and example inputs (real or fake tensors).
    measure_peak : callable, optional
        Meters the opaque modules, which run once; see `tightfit.allocator.measure_peak`.
    layouts : mapping, optional
        How kernels lay out their results where fake kernels say otherwise.

    Raises
    ------
    CaptureError
        If the call branches on data, has outputs of unknown shape, uses tensors that are no
        parameter, buffer or input, or does anything else the tracer cannot follow; names the
        module that was running.
    """
    trail = ModuleTrail(call.modules)
    opaque = OpaqueCalls(call.modules, measure_peak, call.opaque, call.examples)
    regions = CastRegions()
    with explained(trail), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        leaves = flatten((call.args, call.kwargs))[0]
        recorder = DecisionRecorder(leaves, call.owners, trail, call.answers, call.answered)
        opaque.look_up = recorder.known_value
        callee = _Callee(call, opaque, recorder)
        with contextlib.ExitStack() as stack:
            stack.enter_context(private.keep_composites_whole())
            stack.enter_context(private.lists_number_by_number())
            stack.enter_context(corrected_fake_kernels())
            stack.enter_context(true_layouts(layouts or {}))
            stack.enter_context(private.backward_without_autocast())
            stack.enter_context(private.hidden_changes_without_tangents(callee.is_parameter))
            stack.enter_context(traced_operators(recorder.values_of))
            stack.enter_context(trail)
            stack.enter_context(regions)
            stack.enter_context(callee.repeated)
            stack.enter_context(opaque)
            args, kwargs = opened((call.args, call.kwargs))
            joint = private.aot_export_joint_with_descriptors(stack, callee, args, kwargs)
    assert callee.structure is not None
    kept = {
        "structure": callee.structure,
        "trail": trail,
        "decisions": recorder.decisions(),
        "questions": tuple(recorder.questions),
        "answers": call.answers,
        "outside": {PREFIX: call.outside.holder} if call.outside else {},
        "opaque": opaque,
        "regions": regions,
    }
    return _read(joint, kept, call.detached_outputs)


def _read(joint: Any, kept: dict[str, Any], detached: frozenset[int]) -> JointGraph:
    module: fx.GraphModule = joint.graph_module
    _refuse_communication(module, kept["trail"])
    note_calls(module.graph)
    metadata = joint._aot_state.fw_metadata
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    output_node = next(iter(reversed(module.graph.nodes)))
    flat = list(private.pytree.arg_tree_leaves(*output_node.args))
    descriptors = list(output_node.meta["desc"])
    position = {n.meta["desc"]: i for i, n in enumerate(placeholders)}
    write_backs: list[tuple[fx.Node, int]] = []
    raw: list[Any] = []
    gradients: list[tuple[fx.Node, int]] = []
    for node, descriptor in zip(flat, descriptors, strict=True):
        match descriptor:
            case private.InputMutationAOTOutput():
                write_backs.append((node, position[descriptor.mutated_input]))
            case private.PlainAOTOutput() | private.IntermediateBaseAOTOutput():
                raw.append(node)
            case private.GradAOTOutput():
                if node is not None:
                    gradients.append((node, position[descriptor.grad_of]))
            case None:
                pass
            case _:
                raise CaptureError(
                    f"the traced step has an output of an unknown kind ({descriptor}); please "
                    "report this with the model"
                )
    return JointGraph(
        module=module,
        placeholders=placeholders,
        sources=_sources(placeholders, descriptors),
        write_backs=write_backs,
        raw_outputs=raw,
        outputs=[
            replace(info, requires_grad=True) if i in detached else info
            for i, info in enumerate(_output_infos(metadata, raw))
        ],
        gradients=gradients,
        **kept,
    )


def _refuse_communication(module: fx.GraphModule, trail: ModuleTrail) -> None:
    """Refuse collectives: called in place, they are wrapped so that their order is kept."""
    for node in module.graph.nodes:
        for called in (node.target, *node.args):
            if getattr(called, "namespace", "") in _COMMUNICATION:
                raise CaptureError(
                    f"module {trail.module_at(node.meta.get('seq_nr'))!r} communicates with other "
                    f"processes ({called}): a plan cannot hold that. Way out: communicate outside "
                    "the fitted part"
                )


def _sources(placeholders: Sequence[fx.Node], output_descriptors: Sequence[Any]) -> list[Source]:
    raw_kinds = (private.PlainAOTOutput, private.IntermediateBaseAOTOutput)
    raw = [d for d in output_descriptors if isinstance(d, raw_kinds)]
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
            case private.TangentAOTInput():
                index = raw.index(descriptor.output) if descriptor.output in raw else -1
                if index < 0:
                    what = getattr(descriptor.output, "mutated_input", descriptor.output)
                    name = getattr(what, "target", what)
                    raise CaptureError(
                        f"the step changes {name} in place and differentiates through it, as "
                        "Embedding(max_norm=...) does with its weight. Way out: clone it before "
                        "changing it, or change it outside the fitted module"
                    )
                sources.append(Source("tangent", f"tangent {index}", index))
            case _:
                raise CaptureError(
                    f"the traced step has an input of an unknown kind ({descriptor}): tensor "
                    "subclasses and inputs that share memory are not supported yet; pass plain, "
                    "separate tensors"
                )
    return sources


def _output_infos(metadata: Any, raw: Sequence[Any]) -> list[OutputInfo]:
    kinds = private.OutputType
    count = len(metadata.output_info)
    infos = []
    for index, info in enumerate(metadata.output_info):
        if info.output_type == kinds.is_input:
            infos.append(OutputInfo("input", info.base_idx, info.requires_grad))
        elif info.output_type == kinds.alias_of_input:
            infos.append(OutputInfo("alias_of_input", info.base_idx, info.requires_grad))
        elif info.output_type in (
            kinds.alias_of_intermediate,
            kinds.alias_of_intermediate_save_as_output,
        ):
            infos.append(OutputInfo("alias_of_output", info.base_idx + count, info.requires_grad))
        elif info.output_type == kinds.alias_of_intermediate_base_is_user_output:
            infos.append(OutputInfo("alias_of_output", info.base_idx, info.requires_grad))
        else:
            infos.append(OutputInfo("plain", index, info.requires_grad))
    return infos
