"""Every private torch name tightfit uses, in one place; tested on each supported release."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._functorch import aot_autograd
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import collect_metadata_analysis
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    IntermediateBaseAOTOutput,
    MetadataMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
    ViewBaseAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    ShapeEnv,
    free_unbacked_symbols,
)
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
    is_traceable_wrapper_subclass,
)
from torch.utils.weak import WeakTensorKeyDictionary

from tightfit.torch_private.patches import replaced

ITEM = torch.ops.aten._local_scalar_dense.default
"""The operator behind `Tensor.item`."""

__all__ = [
    "BufferAOTInput",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "GradAOTOutput",
    "InputMutationAOTOutput",
    "IntermediateBaseAOTOutput",
    "MetadataMutationAOTOutput",
    "OpOverloadPacket",
    "ParamAOTInput",
    "PlainAOTInput",
    "PlainAOTOutput",
    "TangentAOTInput",
    "TorchDispatchMode",
    "UnsupportedFakeTensorException",
    "ViewBaseAOTInput",
    "WeakTensorKeyDictionary",
    "aot_export_joint_with_descriptors",
    "pytree",
]

aten = torch.ops.aten

# Operators that torch decomposes above autograd while tracing although eager runs one kernel.
# Kept whole, the traced step computes the same bits and saves the same tensors as eager.
_KEPT_WHOLE = tuple(
    getattr(aten, name)
    for name in (
        "upsample_nearest1d",
        "upsample_nearest2d",
        "upsample_nearest3d",
        "_upsample_nearest_exact1d",
        "_upsample_nearest_exact2d",
        "_upsample_nearest_exact3d",
        "upsample_linear1d",
        "upsample_bilinear2d",
        "upsample_trilinear3d",
        "upsample_bicubic2d",
        "_upsample_bilinear2d_aa",
        "_upsample_bicubic2d_aa",
        "lstm_cell",
        "multi_margin_loss",
        "multilabel_margin_loss_forward",
        "rnn_relu_cell",
        "rnn_tanh_cell",
    )
    if hasattr(aten, name)
)


def _cudnn_batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, *factors: float
) -> Any:
    """Return cuDNN's results, in training by the operator that says which buffers it writes.

    Torch would take its own kernel while tracing, which is slower and rounds differently. Without
    running statistics, throw-away ones are written.
    """
    if not training:  # writes nothing
        key = torch._C.DispatchKey.Autograd
        return aten.cudnn_batch_norm.default._op_dk(
            key, x, weight, bias, mean, variance, training, *factors
        )
    if mean is None:
        mean, variance = torch.zeros_like(weight), torch.ones_like(weight)
    return aten._batch_norm_with_update.default(x, weight, bias, mean, variance, *factors)


@contextlib.contextmanager
def keep_composites_whole() -> Iterator[None]:
    """While tracing, dispatch the listed operators to their kernels instead of decompositions."""
    overloads = [getattr(packet, name) for packet in _KEPT_WHOLE for name in packet.overloads()]
    cudnn = aten.cudnn_batch_norm.default
    own = {**cudnn.py_kernels, torch._C.DispatchKey.Autograd: _cudnn_batch_norm}
    with _with_kernels({cudnn: own}), python_kernels(dict.fromkeys(overloads)):
        yield


@contextlib.contextmanager
def python_kernels(kernels: Mapping[Any, Callable[..., Any] | None]) -> Iterator[None]:
    """While tracing, run functions in place of operators; None: the kernel, no decomposition."""
    keys = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)
    by_key: dict[Any, dict[Any, Any]] = {}
    for overload, function in kernels.items():
        by_key[overload] = {k: f for k, f in overload.py_kernels.items() if k not in keys}
        by_key[overload] |= {} if function is None else {keys[1]: function}
    with _with_kernels(by_key):
        yield


@contextlib.contextmanager
def _with_kernels(kernels: Mapping[Any, Mapping[Any, Any]]) -> Iterator[None]:
    """Give operators other functions by dispatch key for a while."""

    def put(kernels: Mapping[Any, Mapping[Any, Any]]) -> None:
        for overload, own in kernels.items():
            overload.py_kernels.clear()
            overload.py_kernels.update(own)
            overload._dispatch_cache.clear()

    before = {overload: dict(overload.py_kernels) for overload in kernels}
    put(kernels)
    try:
        yield
    finally:
        put(before)


def composite(operator: Any, *args: Any) -> Any:
    """Run torch's decomposition of an operator, even if another is installed in its place."""
    return operator._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args)


@contextlib.contextmanager
def without_open_transforms() -> Iterator[None]:
    """End transforms that a failing context has begun: torch.func, forward-mode derivatives."""
    depth = torch._C._functorch.get_dynamic_layer_stack_depth()
    is_forward_mode = forward_ad._current_level >= 0
    try:
        yield
    except BaseException:
        torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        if not is_forward_mode:
            with contextlib.suppress(RuntimeError):  # that there is none
                torch._C._exit_dual_level(level=0)
        raise


def caches_parametrizations() -> bool:
    """Whether a parametrized tensor is computed once until a context ends, for all its readers."""
    return bool(parametrize._cache_enabled)


def is_made_of_others(function: OpOverload) -> bool:
    """Whether an operator has no kernel of its own and calls others, as `reshape` does.

    Above autograd it is taken apart; where autograd is out of the way, as in inference mode, modes
    see it whole.
    """
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    name = function._schema.name
    name += f".{function._schema.overload_name}" if function._schema.overload_name else ""
    return has_kernel(name, "CompositeImplicitAutograd") and not has_kernel(name, "CPU")


@contextlib.contextmanager
def symbolic_numbers() -> Iterator[None]:
    """While tracing, let numbers read from tensors be symbols; sizes stay numbers."""
    before = aot_autograd.construct_fake_mode

    def fake_mode(*given: Any) -> Any:
        mode, _ = before(*given)
        if mode.shape_env is None:
            mode = _StaticShapes(shape_env=ShapeEnv())
        return mode, mode.shape_env

    with replaced(aot_autograd, construct_fake_mode=fake_mode):
        yield


class _StaticShapes(FakeTensorMode):
    """Makes fake tensors whose sizes are plain numbers, though numbers read from them are not."""

    def from_tensor(self, tensor: Any, *, static_shapes: Any = None, **given: Any) -> Any:
        return super().from_tensor(tensor, static_shapes=True, **given)


class _ModeNeverCopied(FakeTensorMode):
    """Stays the same for copies of its tensors, which carry it: a copy of it breaks both."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _ModeNeverCopied:
        return self


@contextlib.contextmanager
def fake_modules() -> Iterator[None]:
    """Make modules without memory, also by copying: `nn.TransformerEncoder` copies its layer."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        with _ModeNeverCopied():
            yield


def symbols_in(value: Any) -> frozenset[str]:
    """Return the names of the numbers that a value is computed from while a step is traced."""
    if not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | torch.Tensor):
        return frozenset()
    return frozenset(map(str, free_unbacked_symbols(value)))


def symbols_asked_for(error: BaseException | None) -> frozenset[str]:
    """Return the names of the numbers whose values were asked for, by the error."""
    while error is not None and not isinstance(error, GuardOnDataDependentSymNode):
        error = error.__cause__ or error.__context__
    return frozenset(map(str, error.cond.free_symbols)) if error is not None else frozenset()


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a class that wraps other tensors, such as a DTensor."""
    return is_traceable_wrapper_subclass(tensor) or tensor.is_nested


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory.

    Gradients of zeros that autograd makes have none, nor have the stand-ins of a trace.
    """
    return not tensor._is_zerotensor() and not isinstance(tensor, FunctionalTensor)


@contextlib.contextmanager
def hidden_changes_without_tangents(is_parameter: Callable[[Any], bool]) -> Iterator[None]:
    """While tracing, forbid differentiating through code that autograd does not see.

    A tensor changed under `no_grad` or by its `data` is the same to autograd afterwards, though the
    tracer makes a further output of it that could receive a gradient. A parameter cannot be changed
    in another way.
    """
    plain = collect_metadata_analysis.InputAliasInfo
    hidden = collect_metadata_analysis.are_all_mutations_hidden_from_autograd

    def info(**given: Any) -> Any:
        under_no_grad = given["mutations_under_no_grad_or_inference_mode"]
        if given["mutates_data"] and (given["mutations_hidden_from_autograd"] or under_no_grad):
            given["requires_grad"] = False
        return plain(**given)

    def are_hidden(tensor: Any) -> bool:
        return is_parameter(tensor) or hidden(tensor)

    with replaced(
        collect_metadata_analysis,
        InputAliasInfo=info,
        are_all_mutations_hidden_from_autograd=are_hidden,
    ):
        yield


def sequence_number() -> int:
    """Return the number autograd gives to the next node; traced nodes carry it."""
    return torch._C._autograd._get_sequence_nr()


def storage_key(tensor: torch.Tensor) -> int:
    """Return a key that two (fake) tensors share exactly if they share a storage."""
    return tensor.untyped_storage()._cdata


def viewed(tensor: torch.Tensor) -> torch.Tensor:
    """Return the base of a tensor, as autograd knows it; itself if it is no view."""
    return tensor if tensor._base is None else tensor._base


def like(
    tensor: Any, dtype: torch.dtype | None = None, mode: FakeTensorMode | None = None
) -> torch.Tensor:
    """Return a fake tensor of the same geometry with a storage of its own.

    `mode`: in which it is fake; None: in the mode of the tensor.
    """
    with mode or tensor.fake_mode:
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device=tensor.device
        )


def fake_mode_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which tensors are made fake as a given tensor is, if it is fake."""
    return getattr(tensor, "fake_mode", None) or contextlib.nullcontext()


def backward_without_autocast() -> contextlib.AbstractContextManager[None]:
    """Return a context in which the traced backward is not cast: eager calls it outside too."""
    if not hasattr(functorch_config, "backward_pass_autocast"):
        return contextlib.nullcontext()
    return functorch_config.patch(backward_pass_autocast="off")


@contextlib.contextmanager
def watched_autocast(changed: Callable[[], None]) -> Iterator[None]:
    """Call a function after every start and end of autocast in the context."""
    kind = torch.amp.autocast_mode.autocast
    enter, leave = kind.__enter__, kind.__exit__

    def watched_enter(self: Any) -> Any:
        result = enter(self)
        changed()
        return result

    def watched_leave(self: Any, *details: Any) -> Any:
        result = leave(self, *details)
        changed()
        return result

    with replaced(kind, __enter__=watched_enter, __exit__=watched_leave):
        yield


def autocast_dtypes() -> tuple[tuple[str, torch.dtype], ...]:
    """Return the types of devices under autocast, each with the type that it casts to."""
    devices = filter(torch.is_autocast_enabled, ("cpu", "cuda"))
    return tuple((device, torch.get_autocast_dtype(device)) for device in devices)


def autocast_nesting() -> int:
    """Return how many contexts of autocast are open; casts are forgotten when there is none."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


@contextlib.contextmanager
def autocast_cache(enabled: bool) -> Iterator[None]:
    """Let autocast say that it keeps casts, or not; while a step is traced it says it does not."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(enabled)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def min_cut_partition(
    module: torch.fx.GraphModule, forward_outputs: int, share: float
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Split a joint module, which is changed, as the min-cut partitioner of torch.compile does.

    `forward_outputs`: how many of the module's outputs are the forward's. `share`: the activation
    memory budget.
    """
    with functorch_config.patch(activation_memory_budget=share, cse=False):
        return min_cut_rematerialization_partition(module, None, num_fwd_outputs=forward_outputs)


def detached(inputs: Iterable[Any]) -> list[Any]:
    """Return inputs with tensors without a history in the place of tensors."""
    with torch._C._AutoDispatchBelowAutograd():  # which has nothing to note of them
        return [x.detach() if isinstance(x, torch.Tensor) else x for x in inputs]


without_autocast: Callable[[], contextlib.AbstractContextManager[None]] = torch._C._DisableAutocast
"""Returns a context in which no operator is cast: a traced step has its casts inside."""


def foreach_copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy tensors into others of their shapes, by one kernel where they are of one type."""
    torch._foreach_copy_(targets, sources)


same_versions = torch.autograd._unsafe_preserve_version_counter
"""Returns a context in which changes of given tensors (a tuple) are not counted by autograd."""


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Let operators run for real although a trace is running, saved-tensor hooks included."""
    with _disable_current_modes(), torch._C._DisablePythonDispatcher():
        tracing = torch._C._autograd._saved_tensors_hooks_set_tracing(False)
        try:
            yield
        finally:
            torch._C._autograd._saved_tensors_hooks_set_tracing(tracing)


@contextlib.contextmanager
def without_meta_log() -> Iterator[None]:
    """Keep PyTorch from writing the traceback of an error that is raised anyway to the console."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")

    def is_unexpected(record: logging.LogRecord) -> bool:
        return "failed while attempting to run meta" not in str(record.msg)

    logger.addFilter(is_unexpected)
    try:
        yield
    finally:
        logger.removeFilter(is_unexpected)


def is_tracing() -> bool:
    """Whether operators go into a trace now, and do not run for real."""
    return _get_current_dispatch_mode() is not None


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a stand-in while a step is traced, and has no values."""
    return isinstance(tensor, FakeTensor | FunctionalTensor)


def call_parameter(tensor: torch.Tensor) -> None:
    """Let the stand-in of a parameter in a trace be an instance of `nn.Parameter`, too."""
    tensor._is_param = True  # type: ignore[attr-defined]
