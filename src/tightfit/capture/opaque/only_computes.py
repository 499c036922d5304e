"""Whether a module's Python only computes, without side effects; found without running it."""

from __future__ import annotations

import copy
from typing import Any, NoReturn

import torch

from tightfit.allocator.devices import fixed_generators
from tightfit.capture.calls.geometry import Geometry
from tightfit.torch_private import core
from tightfit.torch_private import dynamo as private
from tightfit.torch_private.frames.values import following_values


def only_computes(given: private.Given) -> bool:
    """Whether a module's Python changes nothing that was there before, and says nothing.

    Dynamo follows it for values of the same shapes, with all their decisions, and has to make one
    graph of it. That is not run; deciding values are computed, by a copy of the module.
    """
    tree = core.pytree.tree_map_only(torch.Tensor, Geometry.of, (given.args, dict(given.kwargs)))
    device = next(given.module.parameters(), torch.empty(0)).device
    try:
        with core.without_modes(), fixed_generators(device), torch.no_grad(), following_values():
            twin = copy.deepcopy(given.module)
            args, kwargs = core.pytree.tree_map_only(Geometry, Geometry.materialised, tree)
            private.compiled(twin.forward, _never_run, _FirstGraphOnly())(*args, **kwargs)
    except _TracingEnded as seen:
        return seen.only_computes
    except Exception:  # where it cannot be copied, or fails, its effects are unknown
        return False
    raise AssertionError("nothing of it was followed")


class _TracingEnded(BaseException):
    """Ends a call whose Python has been followed as far as one graph goes."""

    def __init__(self, *, only_computes: bool) -> None:
        super().__init__()
        self.only_computes = only_computes


def _never_run(*_: Any) -> NoReturn:
    raise AssertionError("the end of a graph comes before it is compiled")


class _FirstGraphOnly(private.Follower):
    """Ends a call at the end of its first graph: nothing of it has run then."""

    def ended(self, end: private.End) -> NoReturn:
        """End the call; say whether its Python goes on, or has done something."""
        raise _TracingEnded(only_computes=not end.reason and not end.acts)

    def skipped(self, *_: Any) -> NoReturn:
        """End the call: frames that Dynamo leaves to Python are not seen."""
        raise _TracingEnded(only_computes=False)
