"""Capture one step of a callable: trace, clean up, lift to values and ops."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from tightfit.allocator.resident import granularity_of
from tightfit.capture.calls.modules import refuse_lazy
from tightfit.capture.calls.signature import flatten, refuse_subclass
from tightfit.capture.captured import Captured, placeholder_tensors
from tightfit.capture.handed import ReadsUnseen, is_handed
from tightfit.capture.joint_graph import JointGraph
from tightfit.capture.lift import lift
from tightfit.capture.normalise.passes import normalise
from tightfit.capture.opaque.mark import opaque_modules
from tightfit.capture.reads.executed import Executed, Listener
from tightfit.capture.reads.guard import Reads
from tightfit.capture.reads.python_state import PythonState
from tightfit.capture.recall.recall import Recall
from tightfit.capture.side_effects.attributes import (
    Kept,
    KeptTensors,
    LeftTensors,
    holders,
)
from tightfit.capture.side_effects.leftovers import forget_traced, traced_alive
from tightfit.capture.side_effects.set_weights import refuse_weights_from_outside
from tightfit.capture.stored import StoredTrace
from tightfit.capture.trace.garbage import fewer_collections
from tightfit.capture.trace.numbers import trace_with_numbers
from tightfit.capture.trace.strides import TrueStrides
from tightfit.capture.trace.trace import StateChanged
from tightfit.capture.traced_call import TracedCall
from tightfit.errors import CaptureError, NothingToTrain
from tightfit.graph.ir import Device
from tightfit.torch_private import core as private

__all__ = ["capture", "device_of"]


def capture(
    call: TracedCall,
    *,
    name: str = "",
    strides: TrueStrides | None = None,
    recalls: bool = False,
) -> Captured:
    """Return the graph of one forward and backward of a call, without running it.

    Only opaque modules run, to be measured.

    The model is left exactly as it was: buffers, random generators, Python attributes.

    Parameters
    ----------
    call : TracedCall
        The callable, its modules, example inputs.
    name : str
        A name for the graph.
    strides : mapping, optional
        Those of results where fake kernels say otherwise.
    recalls : bool
        Whether a trace that an earlier process has made may serve, and this one is kept.

    Raises
    ------
    NothingToTrain
        If neither a parameter nor an input requires a gradient.
    CaptureError
        If the step cannot be captured; names the module, the reason and a way out.
    """
    _require_training(call)
    if is_handed(call.function):
        joint = _joint_of_handed(call, strides, recalls=recalls)
        reads, left = ReadsUnseen(), frozenset[Kept]()
    else:
        _require_plain_state(call)
        refuse_weights_from_outside(call.function, call.modules)
        joint, reads, left = _joint(call, strides, recalls=recalls)
    _require_gradients(joint)
    _refuse_foreign_parameters(joint)
    _refuse_sparse(joint)
    _refuse_shared_memory(call, joint)
    tied = _tied(call, joint)
    captured = lift(normalise(joint), device_of(call), name, tied)
    return dataclasses.replace(captured, reads=reads, left=left)


def _joint_of_handed(call: TracedCall, strides: TrueStrides | None, *, recalls: bool) -> JointGraph:
    """Return the traced step of a handed graph: who handed it over knows what Python has read."""
    stored = StoredTrace.of(call, strides) if recalls else None
    found = stored.find() if stored is not None else None
    if found is not None:
        return found
    joint = _traced_handed(call, strides)
    if stored is not None:
        stored.keep(joint)
    return joint


def _traced_handed(call: TracedCall, strides: TrueStrides | None) -> JointGraph:
    alive = traced_alive()
    try:
        with fewer_collections():
            return trace_with_numbers(call, strides)
    finally:
        forget_traced(alive)


def _joint(
    call: TracedCall, strides: TrueStrides | None, *, recalls: bool
) -> tuple[JointGraph, Reads, frozenset[Kept]]:
    """Return the traced step, what it has read, and what it leaves in attributes unread."""
    recall = Recall.of(call, strides) if recalls else None
    found = recall.find() if recall is not None else None
    if found is not None:
        return *found, frozenset[Kept]()
    listener = Listener()
    try:
        joint = _traced(call, strides, listener, looks=True)
    except StateChanged:  # and is as it was, once the tracer is gone
        joint = _traced(call, strides, listener, looks=False)
    executed = listener.executed()
    reads, left = _reads(call, executed)
    if recall is not None:
        recall.keep(joint, executed)
    return joint, reads, left


def _traced(
    call: TracedCall, strides: TrueStrides | None, listener: Listener, *, looks: bool
) -> JointGraph:
    """Trace a step; refuse it if its forward changes Python state, and put that back.

    Parameters
    ----------
    looks : bool
        Whether that is looked for where the forward ends, and not only where the trace does.
    """
    state, alive = PythonState(call.modules), traced_alive()
    try:
        with state, listener, listener.without_operators(), fewer_collections():
            joint = trace_with_numbers(call, strides, looks=looks)
    except (LeftTensors, StateChanged):
        state.raise_if_changed()  # says all that has changed, and why
        raise
    finally:
        forget_traced(alive)
    state.raise_if_changed()
    return joint


def _reads(call: TracedCall, executed: Executed) -> tuple[Reads, frozenset[Kept]]:
    """Return what a traced call has read, and what it leaves without having read it."""
    inputs = frozenset(call.outside.numbers) if call.outside is not None else frozenset()
    kept = call.function if isinstance(call.function, KeptTensors) else None
    left = kept.unread(inputs) if kept is not None else frozenset[Kept]()
    reads = Reads.of(
        executed,
        call.function,
        call.modules,
        tuple(private.pytree.tree_leaves((call.args, call.kwargs))),
        opaque=frozenset(opaque_modules(call.modules, call.opaque).values()),
        outside=call.outside,
        unread=holders(left, call.modules),
    )
    return reads, left


def device_of(call: TracedCall) -> Device:
    """Return the device the modules and inputs of a call lie on.

    Raises
    ------
    CaptureError
        If they lie on several devices.
    """
    tensors = [p for m in call.modules.values() for p in m.parameters()]
    tensors += [b for m in call.modules.values() for b in m.buffers()]
    devices = {t.device for t in tensors if t.device.type != "cpu" or t.numel() > 1}
    kinds = {d for d in devices if d.type != "meta"} or {torch.device("cpu")}
    if len(kinds) > 1:
        listed = ", ".join(sorted(str(d) for d in kinds))
        raise CaptureError(
            f"the model lies on several devices ({listed}); a budget is for one device. Fit the "
            "part on each device by itself"
        )
    device = kinds.pop()
    return Device(
        kind=device.type,
        granularity_bytes=granularity_of(device.type),
        name=_device_name(device),
    )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_name(device)
    return device.type


def _require_training(call: TracedCall) -> None:
    tensors = [p for m in call.modules.values() for p in m.parameters()]
    tensors += [t for t in _leaves(call) if isinstance(t, torch.Tensor)]
    if not any(t.requires_grad for t in tensors):
        raise NothingToTrain(
            "no parameter and no input requires a gradient: there is no training step to plan. "
            "Call requires_grad_() on what is to be trained"
        )


def _leaves(call: TracedCall) -> list[Any]:
    return flatten(call.args, call.kwargs)[0]


def _require_plain_state(call: TracedCall) -> None:
    """Refuse what the tracer would silently get wrong or cannot describe."""
    for prefix, top in call.modules.items():
        for name, module in top.named_modules():
            where = ".".join(p for p in (prefix, name) if p)
            _refuse_compiled(where, module)
            _refuse_synchronising(where, module)
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    refuse_lazy(tensor, f"{where}.{key}")
                    refuse_subclass(tensor, f"{where}.{key}")


def _refuse_compiled(where: str, module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule) or type(module).__name__ == "OptimizedModule":
        raise CaptureError(
            f"module {where!r} is compiled ({type(module).__name__}): what it runs cannot be "
            "planned. Way out: use the plain module (torch.compile keeps it as _orig_mod)"
        )


def _refuse_synchronising(where: str, module: nn.Module) -> None:
    processes = torch.distributed
    if not isinstance(module, nn.SyncBatchNorm) or not module.training:
        return
    if not (processes.is_available() and processes.is_initialized()):
        return
    if processes.get_world_size(module.process_group) > 1:
        raise CaptureError(
            f"module {where!r} is a SyncBatchNorm, whose forward and backward wait for other "
            "processes: a plan cannot hold that. Way out: a norm that needs no other process "
            "(BatchNorm over the rank's own batch, GroupNorm), or leave this module out of the "
            "fitted part",
            module=where,
        )


def _require_gradients(joint: JointGraph) -> None:
    if not joint.gradients:
        raise NothingToTrain(
            "no output depends on a parameter that requires a gradient: there is nothing to "
            "differentiate. Return the loss or the prediction from forward"
        )


def _refuse_foreign_parameters(joint: JointGraph) -> None:
    for node in joint.module.graph.nodes:
        if node.op != "get_attr":
            continue
        tensor = getattr(joint.module, str(node.target), None)
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            raise CaptureError(
                f"the step uses a tensor of shape {tuple(tensor.shape)} that requires a gradient "
                "and belongs to none of the given modules: its gradient would be lost. Pass its "
                "module in modules=[...]"
            )


def _refuse_sparse(joint: JointGraph) -> None:
    for node in joint.module.graph.nodes:
        for value in private.pytree.tree_leaves(node.meta.get("val")):
            if isinstance(value, torch.Tensor) and value.layout != torch.strided:
                where = joint.origins.module_at(node.meta.get("seq_nr"))
                raise CaptureError(
                    f"module {where!r} makes a sparse tensor ({node.target}), such as the gradient "
                    "of Embedding(sparse=True): its size depends on the data and cannot be "
                    "planned. Way out: sparse=False, or leave this module out of the fitted part",
                    module=where,
                )


def _refuse_shared_memory(call: TracedCall, joint: JointGraph) -> None:
    """Refuse to change an input in place that lies in one storage with another tensor.

    Where they overlap may be another place at the next call.
    """
    tensors = placeholder_tensors(joint, call.modules, _leaves(call))
    owners: dict[int, set[int]] = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            owners.setdefault(private.storage_key(tensor), set()).add(id(tensor))
    for _, position in joint.write_backs:
        source = joint.sources[position]
        if source.kind == "input" and len(owners[private.storage_key(tensors[position])]) > 1:
            raise CaptureError(
                f"{source.name} is changed in place and shares its memory with another tensor of "
                "the call: what else that changes cannot be planned. Way out: pass a clone of it"
            )


def _tied(call: TracedCall, joint: JointGraph) -> list[list[int]]:
    """Return groups of placeholder positions that hold one and the same tensor."""
    tensors = placeholder_tensors(joint, call.modules, _leaves(call))
    groups: dict[int, list[int]] = {}
    for position, tensor in enumerate(tensors):
        if isinstance(tensor, torch.Tensor):
            groups.setdefault(id(tensor), []).append(position)
    return [group for group in groups.values() if len(group) > 1]
