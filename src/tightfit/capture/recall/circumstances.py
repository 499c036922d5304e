"""All that a trace rests on and that is known before it is made, as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tightfit.capture.calls.modules import HOOKS, SeenModules
from tightfit.capture.calls.signature import call_signature, flatten
from tightfit.capture.origins import module_names
from tightfit.capture.recall.installation import installation, memory_of, sees_operators
from tightfit.capture.recall.naming import Naming, NotNamed
from tightfit.capture.trace.strides import TrueStrides
from tightfit.capture.traced_call import TracedCall
from tightfit.torch_private import traces

__all__ = ["circumstances"]


def circumstances(call: TracedCall, strides: TrueStrides | None) -> str:
    """Return what a call, its modules, PyTorch and this installation are like.

    Two calls in the same circumstances are traced alike if the code that runs and what that reads
    are the same, too.

    Raises
    ------
    NotNamed
        If anything has no name that would mean the same in another process.
    """
    if sees_operators():
        raise NotNamed("a mode of PyTorch, or hooks of all modules")
    naming = Naming(call.modules)
    leaves, spec = flatten(call.args, call.kwargs)
    inputs, around = call_signature(leaves, spec, SeenModules(call.modules), None)
    modes, settings, modules, *given = around
    tensors = _tensors(leaves, call.modules)
    parts: list[Any] = [
        *installation(tensors),
        call.function,
        (call.loss_alone, call.numbers, call.detached_outputs, call.opaque, call.answered),
        tuple(sorted((strides or {}).items())),
        *inputs,
        *(modes, settings, *modules, *given),
        *_methods(call.modules),
        *traces.patched([type(module) for module in module_names(call.modules).values()]),
        memory_of(tensors),
    ]
    return "\n".join(map(naming.of, parts))


def _methods(modules: Mapping[str, nn.Module]) -> Iterator[Any]:
    """Yield what runs when a module is called: its forward, its hooks."""
    for module in module_names(modules).values():
        own = module.__dict__
        yield type(module).forward
        if "forward" in own and not _is_fitted(own["forward"]):
            yield own["forward"]
        for hooks in HOOKS:
            yield from own[hooks].values()


def _is_fitted(forward: Any) -> bool:
    """Whether a forward is the one that runs planned steps."""
    inner = getattr(forward, "__func__", forward)
    return getattr(inner, "__module__", "").startswith("tightfit.")


def _tensors(leaves: Sequence[Any], modules: Mapping[str, nn.Module]) -> list[torch.Tensor]:
    own = [t for top in modules.values() for t in (*top.parameters(), *top.buffers())]
    return [*own, *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))]
