"""Capture one step of a callable: trace, clean up, lift to values and ops."""

from __future__ import annotations

import gc
from dataclasses import replace

import torch

from tightfit.allocator.resident import granularity_of
from tightfit.capture.captured import Captured, placeholder_tensors
from tightfit.capture.handed import is_handed
from tightfit.capture.joint_graph import JointGraph
from tightfit.capture.lift import lift
from tightfit.capture.normalise.passes import normalise
from tightfit.capture.stepping.steps import Stepper, taking_steps
from tightfit.capture.stored import StoredTrace
from tightfit.capture.trace.garbage import fewer_collections
from tightfit.capture.trace.numbers import trace_with_numbers
from tightfit.capture.trace.strides import TrueStrides
from tightfit.capture.traced_call import TracedCall
from tightfit.errors import CaptureError, NothingToTrain
from tightfit.graph.ir import Device
from tightfit.torch_private import core as private


def capture(
    call: TracedCall,
    *,
    name: str = "",
    strides: TrueStrides | None = None,
    recalls: bool = False,
    stepper: Stepper | None = None,
) -> Captured:
    """Return the graph of one forward and backward of a call, without running it.

    Only opaque modules run, to be measured. Buffers and generators are left as they were. Python
    that changes anything else is not seen: code that follows Python hands over graphs.

    `call`: the callable, its modules, example inputs. `strides`: of results for which fake kernels
    give wrong strides. `recalls`: whether traces of other processes may be used, and
    this one is kept for them. `stepper`: takes the gradients of the parameters that it steps;
    `with_parameter_steps` has it do so. Raises `NothingToTrain` if neither a parameter nor an input
    requires a gradient. Raises `CaptureError` if the step cannot be captured; names the module, the
    reason and a way out.
    """
    _require_training(call)
    joint = _joint(call, strides, recalls=recalls)
    _require_gradients(joint)
    _refuse_foreign_parameters(joint)
    _refuse_sparse(joint)
    _refuse_shared_memory(call, joint)
    joint = replace(normalise(joint), other_strides=call.other_strides)
    if stepper is not None:
        joint = taking_steps(joint, call.modules, stepper)
    return lift(joint, device_of(call), name, _tied(call, joint))


def _joint(call: TracedCall, strides: TrueStrides | None, *, recalls: bool) -> JointGraph:
    """Return the traced step: of a handed graph the stored step, if there is any."""
    handed = is_handed(call.function)
    stored = StoredTrace.of(call, strides, in_files=recalls) if handed else None
    found = stored.find() if stored is not None else None
    if found is not None:
        return found
    joint = _traced(call, strides)
    if stored is not None:
        stored.keep(joint)
    return joint


def _traced(call: TracedCall, strides: TrueStrides | None) -> JointGraph:
    with fewer_collections():
        joint = trace_with_numbers(call, strides)
    if joint.opaque.calls:
        gc.collect()  # tensors of their runs in cycles would take room from measurements
    return joint


def device_of(call: TracedCall) -> Device:
    """Return the device of the modules and inputs of a call.

    Raises `CaptureError` if they are on several devices.
    """
    tensors = [p for m in call.modules.values() for p in m.parameters()]
    tensors += [b for m in call.modules.values() for b in m.buffers()]
    devices = {t.device for t in tensors if t.device.type != "cpu" or t.numel() > 1}
    kinds = {d for d in devices if d.type != "meta"} or {torch.device("cpu")}
    if len(kinds) > 1:
        listed = ", ".join(sorted(str(d) for d in kinds))
        raise CaptureError(
            f"the model is on several devices ({listed}); a budget is for one device. Fit the "
            "part on each device by itself"
        )
    device = kinds.pop()
    return Device(
        kind=device.type, granularity_bytes=granularity_of(device.type), name=_device_name(device)
    )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_name(device)
    return device.type


def _require_training(call: TracedCall) -> None:
    tensors = [p for m in call.modules.values() for p in m.parameters()]
    tensors += [t for t in call.leaves if isinstance(t, torch.Tensor)]
    if not any(t.requires_grad for t in tensors):
        raise NothingToTrain(
            "no parameter and no input requires a gradient: there is no training step to plan. "
            "Call requires_grad_() on the tensors to train"
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
                place = f"module {where!r}" if where else "the outermost module"
                raise CaptureError(
                    f"{place} makes a sparse tensor ({node.target}), such as the gradient "
                    "of Embedding(sparse=True): its size depends on the data and cannot be "
                    "planned. Way out: sparse=False, or leave this module out of the fitted part",
                    module=where,
                )


def _refuse_shared_memory(call: TracedCall, joint: JointGraph) -> None:
    """Refuse to change an input in place that shares its storage with another tensor.

    They may overlap elsewhere in the next call.
    """
    tensors = placeholder_tensors(joint, call.modules, call.leaves)
    owners: dict[int, set[int]] = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            owners.setdefault(private.storage_key(tensor), set()).add(id(tensor))
    for _, position in joint.write_backs:
        source = joint.sources[position]
        if source.kind == "input" and len(owners[private.storage_key(tensors[position])]) > 1:
            raise CaptureError(
                f"{source.name} is changed in place and shares its memory with another tensor of "
                "the call, which cannot be planned. Way out: pass a clone of it"
            )


def _tied(call: TracedCall, joint: JointGraph) -> list[list[int]]:
    """Return groups of placeholder positions that hold one and the same tensor."""
    tensors = placeholder_tensors(joint, call.modules, call.leaves)
    groups: dict[int, list[int]] = {}
    for position, tensor in enumerate(tensors):
        if isinstance(tensor, torch.Tensor):
            groups.setdefault(id(tensor), []).append(position)
    return [group for group in groups.values() if len(group) > 1]
