"""Opaque modules where another tracer follows Python: their forwards are leaves of its graphs.

That tracer needs to know the outputs of a forward; the step is captured later, with measured bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from tightfit.allocator.devices import fixed_generators
from tightfit.capture.calls.geometry import Geometry
from tightfit.capture.calls.structure import is_known
from tightfit.capture.opaque.mark import is_marked, is_opaque, opaque_modules
from tightfit.capture.opaque.recurrent import shapes_alone, takes_computed_weights
from tightfit.capture.restored.python_state import PythonState
from tightfit.errors import CaptureError
from tightfit.torch_private import core as private

Forward = Callable[..., Any]


def leaf_forwards(modules: Mapping[str, nn.Module]) -> dict[Forward, Forward]:
    """Return the forwards that are not to be followed, and a function for outputs of each.

    A forward is the function of a class. Where not all modules of the class are opaque, it is
    followed, and so are recurrent modules whose weights the user's code computes.
    """
    opaque = set(opaque_modules(modules).values())
    every = [module for top in modules.values() for module in top.modules()]
    computed = any(map(takes_computed_weights, every))
    kinds = {type(module) for module in opaque}
    # scripted modules have no forward but their own
    followed = {getattr(type(m), "forward", None) for m in every if not _is_inside(m, opaque)}
    states = {m: {**dict(m.named_parameters()), **dict(m.named_buffers())} for m in opaque}
    return {
        kind.forward: _returned_by(states)
        for kind in kinds
        if kind.forward not in followed and not (computed and issubclass(kind, nn.RNNBase))
    }


def _is_inside(module: nn.Module, opaque: set[nn.Module]) -> bool:
    return is_opaque(module) or any(module in outer.modules() for outer in opaque)


def _returned_by(states: Mapping[nn.Module, Mapping[str, Any]]) -> Forward:
    """Return a function of fake outputs of a forward, made from its run on real tensors.

    It raises `CaptureError` for outputs of a type that the other tracer cannot look into.
    """

    def returned(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if type(module) in (nn.LSTM, nn.GRU, nn.RNN) and not is_marked(module):
            with private.without_modes():  # PyTorch 2.12 decomposes LSTMs to another shape there
                found = shapes_alone(module, _meta(args), _meta(kwargs))
        else:
            found = _really_returned(module, states[module], args, kwargs)
        if not all(map(is_known, private.pytree.tree_leaves(found))):
            raise CaptureError(f"{type(module).__name__} returns a type that no pytree knows")
        device = next(iter(states[module].values()), torch.empty(0)).device
        return private.pytree.tree_map_only(torch.Tensor, lambda t: _like(t, device), found)

    return returned


def _meta(tree: Any) -> Any:
    def without_memory(t: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")

    return private.pytree.tree_map_only(torch.Tensor, without_memory, tree)


def _really_returned(module: nn.Module, state: Mapping[str, Any], args: Any, kwargs: Any) -> Any:
    """Run a module for real on other values; nothing of it changes."""
    tree = private.pytree.tree_map_only(torch.Tensor, Geometry.of, (args, kwargs))
    device = next(iter(state.values()), torch.empty(0)).device
    with private.without_modes(), fixed_generators(device), PythonState(module):
        copied = {n: t if isinstance(t, nn.Parameter) else t.clone() for n, t in state.items()}
        real = private.pytree.tree_map_only(Geometry, Geometry.materialised, tree)
        with torch.no_grad(), private.autocast_cache(False):  # casts kept would have no history
            return functional_call(module, copied, *real)


def _like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    at = device if tensor.device.type == "meta" else tensor.device
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=at)
