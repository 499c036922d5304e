"""Trees are walked as PyTorch walks them, only quicker."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as some
from torch._subclasses import functional_tensor
from torch.utils import _pytree as pytree

from tightfit.torch_private.tracing.trees import quick_functionalisation, tree_leaves, tree_map


class _Pair(NamedTuple):
    first: Any
    second: Any


def _containers(of: Any) -> Any:
    return some.one_of(
        some.lists(of, max_size=3),
        some.lists(of, max_size=3).map(tuple),
        some.dictionaries(some.text(max_size=2), of, max_size=3),
        some.dictionaries(some.text(max_size=2), of, max_size=3).map(OrderedDict),
        some.builds(_Pair, of, of),
    )


LEAVES = some.one_of(
    some.none(), some.integers(), some.just(torch.Size([2, 3])), some.just(slice(1))
)
TREES = some.recursive(LEAVES, _containers, max_leaves=12)


@given(TREES)
def test_a_tree_is_walked_as_by_pytorch(tree: Any) -> None:
    def counted(seen: list[Any]) -> Any:
        return lambda leaf: (seen.append(leaf), len(seen))[1:]

    mine: list[Any] = []
    theirs: list[Any] = []
    assert repr(tree_map(counted(mine), tree)) == repr(pytree.tree_map(counted(theirs), tree))
    assert mine == theirs
    assert tree_leaves(tree) == pytree.tree_leaves(tree)
    with quick_functionalisation():
        quick = functional_tensor.pytree
        assert quick.tree_leaves(tree) == pytree.tree_leaves(tree)
        for wanted in (int, (int, slice), lambda leaf: leaf == 1):
            own = quick.tree_map_only(wanted, str, tree)
            assert repr(own) == repr(pytree.tree_map_only(wanted, str, tree))
    assert functional_tensor.pytree is pytree


def test_what_is_no_leaf_to_the_caller_is_no_leaf() -> None:
    tree = ([1, 2], (3,))
    assert tree_leaves(tree, lambda x: isinstance(x, list)) == [[1, 2], 3]
