"""Trees of plain containers, walked without a description of each.

PyTorch's own functions describe a tree before they walk it. A tracer walks the arguments and the
results of each operator, several times: these walks took a fifth of its time.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch._subclasses import functional_tensor
from torch.utils import _pytree as pytree

from tightfit.torch_private.patches import replaced


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return the same as PyTorch's `tree_map` of one tree."""
    kind = type(tree)
    if kind is tuple:
        return tuple([tree_map(function, each) for each in tree])
    if kind is list:
        return [tree_map(function, each) for each in tree]
    if kind is dict:
        return {key: tree_map(function, each) for key, each in tree.items()}
    return function(tree) if _is_leaf(kind) else pytree.tree_map(function, tree)


def tree_leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """Return the same as PyTorch's `tree_leaves`."""
    if is_leaf is not None:
        return pytree.tree_leaves(tree, is_leaf)
    found: list[Any] = []
    _gather(tree, found)
    return found


def quick_functionalisation() -> AbstractContextManager[None]:
    """Return a context in which the tracer's functionalisation walks trees by these functions."""
    return replaced(functional_tensor, pytree=_QUICK)


def _gather(tree: Any, found: list[Any]) -> None:
    kind = type(tree)
    if kind is tuple or kind is list:
        for each in tree:
            _gather(each, found)
    elif kind is dict:
        for each in tree.values():
            _gather(each, found)
    elif _is_leaf(kind):
        found.append(tree)
    else:
        found += pytree.tree_leaves(tree)


def _is_leaf(kind: type) -> bool:
    """Whether objects of a class are leaves for sure; tuples with names are none."""
    return kind not in pytree.SUPPORTED_NODES and not issubclass(kind, tuple)


def _tree_map_only(
    wanted: Any,
    function: Callable[[Any], Any],
    tree: Any,
    is_leaf: Callable[[Any], bool] | None = None,
) -> Any:
    if is_leaf is not None or not isinstance(wanted, type):
        return pytree.tree_map_only(wanted, function, tree, is_leaf)
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, wanted) else leaf, tree)


_QUICK = types.SimpleNamespace(
    **vars(pytree) | {"tree_map_only": _tree_map_only, "tree_leaves": tree_leaves}
)
