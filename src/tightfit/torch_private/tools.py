"""PyTorch's other tools around a call: Dynamo, torch.func, exports. Private names of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._C import _functorch
from torch._dynamo import OptimizedModule
from torch._dynamo import eval_frame as _dynamo_frames
from torch._dynamo.types import FrameAction, FrameExecStrategy
from torch.autograd import forward_ad
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _python_dispatch

from tightfit.torch_private import core as private


def inside_compiled(module: nn.Module) -> nn.Module:
    """Return the module that torch.compile has wrapped; any other module as it is."""
    return module._orig_mod if isinstance(module, OptimizedModule) else module


def is_exported() -> bool:
    """Whether another tool records the operators that run: torch.jit.trace or torch.export."""
    return torch.jit.is_tracing() or torch.compiler.is_exporting()


def running_transform() -> str:
    """Name the transform that differentiates or maps the running code; "" if there is none."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a transform of torch.func"
    return "forward-mode differentiation" if forward_ad._current_level >= 0 else ""


def running_mode() -> str:
    """Return the mode of PyTorch that sees each operator and may replace it; "" if none."""
    if not _python_dispatch.is_in_any_mode_without_ignore_compile_internals():
        return ""
    mode = _python_dispatch._get_current_dispatch_mode()
    return "" if mode is None else type(mode).__name__


def hide_from_dynamo(function: Any) -> None:
    """Let Dynamo neither compile a function nor trace through a call of it."""
    function._torchdynamo_disable = True
    _dynamo_frames.skip_code(function.__code__)


def hide_all_from_dynamo(function: Any) -> None:
    """Let Dynamo compile neither a function nor its callees."""
    _dynamo_frames.set_code_exec_strategy(function.__code__, _AS_IT_IS)


_AS_IT_IS = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)


class WithoutDynamo:
    """Lets Dynamo leave a callee alone, as ``torch.compiler.disable``, not loading it."""

    def __enter__(self) -> None:
        self._before = _dynamo_frames.set_eval_frame(None)

    def __exit__(self, *_: object) -> None:
        _dynamo_frames.set_eval_frame(self._before)


for _frame in (WithoutDynamo.__enter__, WithoutDynamo.__exit__):
    hide_from_dynamo(_frame)  # it is not put aside yet when the first of them is called


def active_wrapper() -> DistributedDataParallel | None:
    """Return the DistributedDataParallel whose forward is running, if there is any."""
    return DistributedDataParallel._active_ddp_module


def reduces_after_backward(wrapper: DistributedDataParallel) -> bool:
    """Whether the wrapper's next backward reduces at its end: the first of a static graph does."""
    return wrapper.static_graph and not wrapper._static_graph_delay_allreduce_enqueued


def store_of_processes() -> Any:
    """Return the key-value store that all processes of torch.distributed share."""
    return torch.distributed.distributed_c10d._get_default_store()


def local_tensor(tensor: Any) -> Any:
    """Return the tensor with the memory: its part in this process, or the wrapped tensor."""
    while isinstance(tensor, torch.Tensor) and _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return getattr(tensor, "_local_tensor", tensor)


_CUBLAS_BYTES: dict[tuple[torch.device, int], int] = {}


def _multiply(device: torch.device) -> None:
    """Multiply matrices, forward and backward."""
    matrix = torch.ones(8, 8, device=device, requires_grad=True)
    (matrix @ matrix).sum().backward()


def cublas_workspace_bytes(device: torch.device) -> int:
    """Return bytes that cuBLAS keeps for the streams planned on, after letting it take them.

    A workspace for each stream and thread: this thread, and the thread that runs backward. Nothing
    where each product allocates its own and frees it (PyTorch 2.15): then it is workspace of the
    product, which the meter sees.
    """
    stream = torch.cuda.current_stream(device).cuda_stream
    if (device, stream) not in _CUBLAS_BYTES:
        with private.without_modes(), torch.enable_grad():
            clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
            if not _CUBLAS_BYTES and clear is not None:
                clear()
            before = torch.cuda.memory_allocated(device)
            _multiply(device)
            taken = torch.cuda.memory_allocated(device) - before
        _CUBLAS_BYTES[device, stream] = max(taken, *_CUBLAS_BYTES.values(), 0)
    return sum(size for (d, _), size in _CUBLAS_BYTES.items() if d == device)


def step_without_hooks(kind: type[torch.optim.Optimizer]) -> Callable[[Any], Any]:
    """Return the step of a class of optimizers as it was before hooks were put around it.

    Dynamo wraps the steps of some classes once more, sparse Adam's for one.
    """
    step: Any = kind.step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step
