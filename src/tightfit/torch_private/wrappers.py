"""AOTAutograd's runtime wrappers, and their description of a traced step: every private name.

The tracer notes of each input how it is changed, and of each output which tensor it is a view of.
The wrapper turns outputs of a compiled forward into those of the traced function: views of inputs
and of other outputs, inputs themselves, inputs that are changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeAlias

import torch
from torch._C import _functionalization as functionalization
from torch._functorch import aot_autograd  # before its parts, which import one another
from torch._functorch._aot_autograd import collect_metadata_analysis
from torch._functorch._aot_autograd.functional_utils import ViewMetaSequence
from torch._functorch._aot_autograd.runtime_wrappers import RuntimeWrapper
from torch._functorch._aot_autograd.schemas import (
    InputAliasInfo,
    OutputAliasInfo,
    OutputType,
    TensorAlias,
    ViewAndMutationMeta,
)

from tightfit.torch_private.patches import Patch

__all__ = ["TensorAlias"]

RuntimeMetadata: TypeAlias = ViewAndMutationMeta
"""Outputs and changes of a traced step, without anything of the trace itself."""


_TELLS_WHAT_RECEIVES = any(
    field.name == "requires_grad_for_backward" for field in dataclasses.fields(OutputAliasInfo)
)
"""Whether an output says whether it receives a gradient: from PyTorch 2.12 on."""

if _TELLS_WHAT_RECEIVES:
    _OutputInfo = OutputAliasInfo
else:

    @dataclasses.dataclass(frozen=True)
    class _OutputInfo(OutputAliasInfo):  # type: ignore[no-redef]
        """The tracer's record of an output, in the form of PyTorch 2.12 and later."""

        requires_grad_for_backward: bool = False  # whether it receives a gradient
        inherits: bool = False  # whether it requires one only because its base does


@contextlib.contextmanager
def marking_gradient_receivers() -> Iterator[None]:
    """Have the tracer tell views made under `no_grad` from views with a history.

    PyTorch before 2.12 gives both a tangent. There the tracer treats the former as requiring none.
    """
    if _TELLS_WHAT_RECEIVES:
        yield
        return

    def make_info(make: Any, *, requires_grad: bool, **others: Any) -> OutputAliasInfo:
        caller = sys._getframe(2).f_locals  # behind this frame, the patch around it
        output, history = caller["o"], caller["grad_fn"]
        receives = requires_grad and (output._base is None or history is not None)
        return _OutputInfo(
            requires_grad=receives,
            requires_grad_for_backward=receives,
            inherits=requires_grad and not receives,
            **others,
        )

    with _MAKE_OUTPUT_INFO.by(make_info):
        yield


_MAKE_OUTPUT_INFO = Patch(collect_metadata_analysis, "OutputAliasInfo")


def metadata_of(joint: Any) -> RuntimeMetadata:
    """Return the tracer's record of the forward of an exported step."""
    return joint._aot_state.fw_metadata


def receives_gradient(info: OutputAliasInfo) -> bool:
    """Whether an output may receive a gradient.

    PyTorch before 2.12 says it as `requires_grad` where inputs share memory.
    """
    return getattr(info, "requires_grad_for_backward", info.requires_grad)


def takes_gradient(joint: Any, place: int) -> bool:
    """Whether an input of an exported step requires a gradient."""
    return joint._aot_state.flat_args[place].requires_grad


def runtime_metadata(metadata: RuntimeMetadata, inside: Collection[int]) -> RuntimeMetadata:
    """Return the information that the wrapper is made of.

    `metadata`: the tracer's record. `inside`: inputs that the compiled forward itself changes: the
    wrapper leaves them alone.
    """
    inputs = [
        dataclasses.replace(info, mutates_data=False, mutates_metadata=False)
        if position in inside
        else info
        for position, info in enumerate(metadata.input_info)
    ]
    outputs = [
        dataclasses.replace(
            info,
            raw_type=torch.Tensor,
            requires_grad=info.requires_grad or getattr(info, "inherits", False),
        )
        for info in metadata.output_info
    ]
    return _safe(inputs, outputs, metadata.num_intermediate_bases)


def _safe(
    inputs: list[InputAliasInfo], outputs: list[OutputAliasInfo], bases: int
) -> RuntimeMetadata:
    metadata = ViewAndMutationMeta(
        input_info=inputs,
        output_info=outputs,
        num_intermediate_bases=bases,
        keep_input_mutations=False,
        traced_tangents=[],
        traced_tangents_descs=[],
        subclass_inp_meta=[],
        subclass_fw_graph_out_meta=[],
        subclass_tangent_meta=[],
    )
    metadata.make_runtime_safe()
    return metadata


def wrapped(
    forward: Callable[[list[Any]], list[Any]], metadata: RuntimeMetadata
) -> Callable[[list[Any]], list[Any]]:
    """Return a compiled forward that returns the outputs of the traced function.

    `forward`: takes the inputs, and further arguments after them; returns the changed inputs, the
    outputs and the tensors that several outputs view. A value that is no output of an autograd node
    is in a `TensorAlias`. `metadata`: the information that the wrapper is made of.
    """
    function: Callable[..., list[Any]] = _raise_inspected

    def run(given: list[Any]) -> list[Any]:
        return function(given)

    run._boxed_call = True  # type: ignore[attr-defined]  # it takes one list
    wrapper = RuntimeWrapper(indices_of_inps_to_detach=[], trace_joint=True, disable_amp=False)
    unused = (None, None, None, {}, 0, 0)
    config = aot_autograd.AOTConfig(*unused, keep_inference_input_mutations=False)  # type: ignore
    result = wrapper.post_compile(run, config, runtime_metadata=metadata)
    with contextlib.suppress(
        _CallInspected
    ):  # its first call runs under a mode that sees operators
        result([None] * len(metadata.input_info))
    function = forward
    return result


class _CallInspected(Exception):
    """Ends the call in which the wrapper looks at custom operators."""


def _raise_inspected(given: list[Any]) -> list[Any]:
    raise _CallInspected


def facts_of(metadata: RuntimeMetadata) -> tuple[Any, ...]:
    """Return all of it, in plain values."""
    inputs = tuple(tuple(_fields(info).values()) for info in metadata.input_info)
    return inputs, tuple(map(_output_facts, metadata.output_info)), metadata.num_intermediate_bases


def metadata_with(inputs: Any, outputs: Any, bases: int) -> RuntimeMetadata:
    """Return the metadata that such values tell."""
    made = [InputAliasInfo(*each) for each in inputs]
    return _safe(made, [_output_with(each) for each in outputs], bases)


def _fields(info: Any) -> dict[str, Any]:
    return {field.name: getattr(info, field.name) for field in dataclasses.fields(info)}


def _output_facts(info: OutputAliasInfo) -> tuple[Any, ...]:
    sequence = None
    if info.view_meta_sequence is not None:
        sequence = tuple(
            (type(view).__name__, tuple(map(_plain, view.as_tuple())))
            for view in info.view_meta_sequence.sequence
        )
    flags = info.requires_grad, receives_gradient(info)
    return info.output_type.name, info.base_idx, *flags, sequence


def _output_with(facts: tuple[Any, ...]) -> OutputAliasInfo:
    """Return the output of which `_output_facts` are these."""
    kind, base, requires_grad, receives, sequence = facts
    views = None
    if sequence is not None:
        views = ViewMetaSequence.__new__(ViewMetaSequence)
        views.sequence = [
            getattr(functionalization, name)(tuple(map(_special, values)))
            for name, values in sequence
        ]
        views.metadata = None  # type: ignore[assignment]  # compares traces
    return _OutputInfo(
        output_type=OutputType[kind],
        raw_type=torch.Tensor,
        base_idx=base,
        dynamic_dims=None,
        requires_grad=requires_grad,
        view_meta_sequence=views,
        requires_grad_for_backward=receives,
    )


_MODES = functionalization.InverseReturnMode


def _plain(value: Any) -> Any:
    return {"mode": value.name} if isinstance(value, _MODES) else value


def _special(value: Any) -> Any:
    return getattr(_MODES, value["mode"]) if isinstance(value, dict) else value
