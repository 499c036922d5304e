"""The state of autograd's engine: the running backward, and edges of its graph."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._C._functorch import unwrap_if_dead
from torch.autograd.graph import GradientEdge, _engine_run_backward


def applied(node: Any, more: Iterable[Any], owners: Iterable[torch.Tensor]) -> Any:
    """Make a node of a class, given arguments and tensors whose gradients it returns.

    Where no transform of torch.func runs, the layer for these is left out.
    """
    if torch._C._are_functorch_transforms_active():
        return node.apply(*more, *owners)
    return super(torch.autograd.Function, node).apply(*more, *map(unwrap_if_dead, owners))


def running_backward() -> int:
    """Return the number of the backward that runs now; -1: none does."""
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    """Return whether autograd's engine runs the present code."""
    return running_backward() != -1


def keeps_graph() -> bool:
    """Return whether the backward that runs now may be followed by another (retain_graph)."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def after_this_backward(call: Callable[[], Any]) -> None:
    """Have something called when the backward that runs now has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(call)  # type: ignore[attr-defined]


def gradient_edge(tensor: torch.Tensor) -> tuple[Any, int]:
    """Return where in autograd's graph the gradient of a tensor goes: a node, and its place."""
    edge = torch.autograd.graph.get_gradient_edge(tensor)
    return edge.node, edge.output_nr


_OWN = f"{__name__.partition('.')[0]}."  # how the names of tightfit's modules begin


def hooks_of_gradient(tensor: torch.Tensor) -> list[Any]:
    """Return the hooks that run when a tensor's gradient has come, other than tightfit's own."""
    hooks = tensor._backward_hooks, tensor._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    every = (hook for known in hooks if known for hook in known.values())
    return [hook for hook in every if not getattr(hook, "__module__", "").startswith(_OWN)]


@contextlib.contextmanager
def without_hooks(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Have gradients of tensors go by their hooks, and not kept: what comes is a part of them."""
    tensors = list(tensors)
    hooks = [(known, dict(known)) for x in tensors if (known := x._backward_hooks)]
    kept = [(x, x.grad) for x in tensors if x.retains_grad]
    for known, _ in hooks:  # the engine asks the same dictionary in each backward
        known.clear()
    try:
        yield
    finally:
        for known, own in hooks:
            known.update(own)
        for x, gradient in kept:
            x.grad = gradient


def is_differentiated_by(tensor: torch.Tensor) -> bool:
    """Whether the backward that runs now was asked for the gradient of a tensor by itself.

    The engine does not tell: its caller, in this thread or the one that waits for it, does.
    """
    if runs_in_this_backward(node_elsewhere()):  # it comes to every node: asked for all leaves
        return False
    edge = gradient_edge(tensor)
    return any(
        x is tensor or (isinstance(x, GradientEdge) and (x.node, x.output_nr) == edge)
        for frame in sys._current_frames().values()
        for x in _asked_for(frame)
    )


def _asked_for(frame: types.FrameType | None) -> Iterator[Any]:
    """Yield the tensors whose gradients a thread has asked for, from its innermost frame on."""
    while frame is not None:
        if frame.f_code is _engine_run_backward.__code__:
            yield from frame.f_locals["args"][_INPUTS]
        frame = frame.f_back


_INPUTS = 3
"""Their place among its arguments after the outputs."""


@functools.cache
def node_elsewhere() -> Any:
    """Return a node of autograd that no backward comes to."""
    with torch.enable_grad():
        return torch.empty(0, requires_grad=True).view(0).grad_fn  # that holds no memory


def asks_for_gradient(node: Any) -> bool:
    """Whether the backward that runs now computes the gradient for a node of autograd."""
    try:
        return runs_in_this_backward(node)
    except RuntimeError:  # a leaf for which `torch.autograd.grad` was called
        return True


def runs_in_this_backward(node: Any) -> bool:
    """Whether the backward that runs now goes through a node of autograd."""
    return torch._C._will_engine_execute_node(node)
