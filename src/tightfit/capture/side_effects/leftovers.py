"""What a trace leaves behind where code keeps what it computes: tensors without values.

A cache of positions, a memoized function, parametrizations that are cached: a trace fills them
with tensors that stand for others. Whoever reads them later, outside of the trace, dies inside
PyTorch. So after every trace what still holds such a tensor lets go of it, wherever that is.
"""

from __future__ import annotations

import collections
import functools
import gc
import sys
import types
from collections.abc import Iterable
from typing import Any

import torch

from tightfit.allocator.alive import alive
from tightfit.torch_private import core as private

__all__ = ["forget_traced", "traced_alive"]

_CACHED = type(functools.cache(len))  # what `functools.lru_cache` makes of a function
_OWN = (
    "torch._",
    "torch.fx",
    "torch.utils._",
    "sympy.",
    "tightfit",
)  # who may hold them, and forgets them
_DEEPEST = 4  # tuples in tuples, and objects in them


def traced_alive() -> int:
    """Return a number that is higher the more tensors of traces are alive; it costs nothing."""
    return sys.getrefcount(private.FunctionalTensor)  # each of them refers to its class


def forget_traced(before: int) -> None:
    """Let every container, cache, object and closure forget the tensors of a trace that ended.

    Parameters
    ----------
    before : int
        `traced_alive` when it began: where no more are alive now, nothing is looked for.
    """
    if traced_alive() <= before:
        return
    traced = alive({private.FunctionalTensor})
    if not traced:
        return
    for wrapper in filter(_may_keep_results, alive({_CACHED})):
        if _holds_traced(wrapper):
            wrapper.cache_clear()
    level: list[Any] = traced
    for _ in range(_DEEPEST):
        seen = {id(x) for x in level}
        above: list[Any] = []
        holders = gc.get_referrers(*level)
        owners = _owners_of([holder for holder in holders if type(holder) is dict])
        for holder in holders:
            if type(holder) in (tuple, frozenset):
                above.append(holder)
            elif id(holder) in owners:
                _reset(owners[id(holder)], seen)
            elif holder is not level and holder is not traced:
                _let_go(holder, seen)
        if not above:
            return
        level = above
        del above, holders, owners  # they would be found too


def _let_go(holder: Any, forgotten: set[int]) -> None:
    """Let one object forget some; what is no container, or PyTorch's and ours, stays as it is."""
    match holder:
        case types.ModuleType() | type():
            return  # their names are in a dict that is found too
        case dict():
            for key in [k for k, v in list(holder.items()) if {id(k), id(v)} & forgotten]:
                _plain_kind(holder).__delitem__(holder, key)
        case list() | collections.deque():
            kept = [x for x in holder if id(x) not in forgotten]
            holder.clear()
            holder.extend(kept)
        case set():
            holder.difference_update([x for x in holder if id(x) in forgotten])
        case types.CellType():
            holder.cell_contents = None
        case _ if _is_users_object(holder):
            _reset(holder, forgotten)


def _plain_kind(holder: dict[Any, Any]) -> type[dict[Any, Any]]:
    """Return whose methods take something out of a dict whose own class may not let go of it."""
    ordered = collections.OrderedDict
    return ordered if isinstance(holder, ordered) else dict


def _reset(owner: Any, forgotten: set[int]) -> None:
    for key in [k for k, v in vars(owner).items() if id(v) in forgotten]:
        if isinstance(owner, type):
            setattr(owner, key, None)
        else:
            vars(owner)[key] = None  # frozen or not


def _owners_of(names: list[dict[Any, Any]]) -> dict[int, Any]:
    """Return what some dicts hold the attributes of, by their ids: objects, classes and files.

    All referrers are looked for at once: each look goes through every object there is.
    """
    wanted = {id(each) for each in names}
    owners: dict[int, Any] = {}
    for holder in gc.get_referrers(*names) if names else ():
        if isinstance(holder, type):
            own = [x for x in gc.get_referents(holder) if type(x) is dict and id(x) in wanted]
            owners.update((id(each), holder) for each in own)
        elif id(attributes := getattr(holder, "__dict__", None)) in wanted:
            owners[id(attributes)] = holder
    return owners


def _is_users_object(holder: Any) -> bool:
    kind = type(holder)
    return hasattr(holder, "__dict__") and not (kind.__module__ or "").startswith(_OWN)


def _may_keep_results(wrapper: Any) -> bool:
    """Whether a cached function keeps anything, and is none of PyTorch's and ours."""
    own = (getattr(wrapper, "__module__", None) or "").startswith(_OWN)
    return not own and wrapper.cache_info().currsize > 0


def _holds_traced(wrapper: Any) -> bool:
    """Whether a cached result is a tensor of a trace, or a container or an object with one."""
    found = gc.get_referents(wrapper)  # of a cache with a largest size the results themselves
    if any(map(_is_traced, found)):
        return True
    waiting: Iterable[Any] = [x for x in found if type(x) in (dict, tuple, list)]
    for _ in range(3):
        found = [x for each in waiting for x in gc.get_referents(each)]
        if any(map(_is_traced, found)):
            return True
        waiting = [x for x in found if not isinstance(x, type | str | int | float)]
    return False


def _is_traced(value: Any) -> bool:
    """Whether it is a tensor of a trace; its class is asked, for some answer `isinstance` aloud."""
    return issubclass(type(value), torch.Tensor) and private.is_traced(value)
