"""Functions that Dynamo puts into its graphs as calls, without following them. Private names."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import fx, nn
from torch._dynamo import trace_rules
from torch._higher_order_ops.invoke_leaf_function import (
    _retrieve_module_by_index,
    invoke_leaf_function,
)
from torch.utils._pytree import tree_leaves, tree_unflatten

from tightfit.torch_private.frames.follower import Given

HAS_LEAVES = "input_spec" in inspect.signature(type(invoke_leaf_function).__call__).parameters
"""Whether a graph says how a leaf's arguments nest: not before 2.12. There leaves end a graph."""


class ArgumentsKnown(BaseException):
    """Ends following where inputs of a forward are known."""

    def __init__(self, forward: Any, given: Given) -> None:
        super().__init__()
        self.forward, self.given = forward, given


@contextlib.contextmanager
def as_leaves(leaves: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """Have Dynamo put calls of some functions into its graphs as they are."""
    known = trace_rules._leaf_function_ids
    for function, on_fakes in leaves.items():
        known.add(id(function))
        function._torchdynamo_leaf_real_fn = function
        function._torchdynamo_leaf_fake_fn = on_fakes
        function._torchdynamo_leaf_mutates_args = frozenset[str]()
    try:
        yield
    finally:
        for function in leaves:
            known.remove(id(function))
            for name in _OF_LEAVES:
                delattr(function, name)


_OF_LEAVES = (
    "_torchdynamo_leaf_real_fn",
    "_torchdynamo_leaf_fake_fn",
    "_torchdynamo_leaf_mutates_args",
)


def asking(forward: Any) -> dict[Any, Callable[..., Any]]:
    """Return a leaf that tells its inputs, if a forward is asked about."""

    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        raise ArgumentsKnown(forward, Given(module, args, kwargs))

    return {} if forward is None else {forward: called}


def noted(leaves: Mapping[Any, Callable[..., Any]], failed: set[Any]) -> dict[Any, Any]:
    """Return leaves whose results on fake tensors, where they cannot be made, are noted."""

    def noting(function: Any, on_fakes: Callable[..., Any]) -> Callable[..., Any]:
        def returned(*args: Any, **kwargs: Any) -> Any:
            try:
                return on_fakes(*args, **kwargs)
            except Exception:
                failed.add(function)
                raise

        return returned

    return {function: noting(function, on_fakes) for function, on_fakes in leaves.items()}


def is_leaf_call(node: fx.Node) -> bool:
    """Whether a node calls the forward of a module that Dynamo did not follow."""
    return HAS_LEAVES and node.target is invoke_leaf_function


def leaf_of(module: fx.GraphModule, node: fx.Node) -> nn.Module:
    """Return the module whose forward a node calls, while a call of its graph is running."""
    return _retrieve_module_by_index(_given(module, node, node.args[4:])[0][0].nn_module_index)


def run_leaf(module: fx.GraphModule, node: fx.Node, leaf: nn.Module, flat: Any) -> tuple[Any, ...]:
    """Call the forward of a module as a node does."""
    (_, *args), kwargs = _given(module, node, flat[4:])
    return tuple(tree_leaves(leaf.forward(*args, **kwargs)))


def _given(module: fx.GraphModule, node: fx.Node, flat: Any) -> Any:
    spec: Any = node.args[2]
    return tree_unflatten(list(flat), getattr(module, spec.target))
