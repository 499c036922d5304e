"""The pieces of a traced step, packed and unpacked: trees, fake tensors, operators."""

from __future__ import annotations

import builtins
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.fx.node import _get_qualified_name
from torch.utils import _pytree as pytree
from torch.utils._contextlib import _DecoratorContextManager as DecoratingContext

__all__ = ["DecoratingContext"]


def tree_of(kind: Any, context: Any, children: Sequence[Any]) -> Any:
    """Return a tree spec; one of no class is a leaf."""
    if kind is None:
        return pytree.tree_structure(0)
    return pytree.TreeSpec(kind, context, list(children))


def is_plain_fake(tensor: torch.Tensor) -> bool:
    """Whether a fake tensor is nothing but a shape, strides and a place in a storage."""
    return (
        type(tensor) is FakeTensor
        and tensor.layout == torch.strided
        and not torch._is_zerotensor(tensor)
        and all(type(x) is int for x in (*tensor.shape, *tensor.stride(), tensor.storage_offset()))
    )


def conjugate_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor whose numbers are read conjugated."""
    return torch._conj(tensor)


def negative_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor whose numbers are read negated."""
    return torch._neg_view(tensor)


def fake_in(mode: FakeTensorMode, meta: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a fake tensor with the layout of a tensor without memory."""
    return FakeTensor(mode, meta, device)


def forget_real_tensors(fakes: Iterable[Any]) -> None:
    """Have fake tensors hold no reference to those they were made of.

    `torch.utils.swap_tensors` refuses a tensor that is referred to weakly.
    """
    for mode in {x.fake_mode for x in fakes if isinstance(x, FakeTensor)}:
        mode.fake_tensor_converter.meta_converter.describer.lookup_tensor.clear()


def operator_named(name: str) -> Any:
    """Return an operator by its name, such as ``aten::add.Tensor``.

    Raises `AttributeError` if there is none.
    """
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def patched(classes: Sequence[type]) -> Iterator[tuple[str, Any]]:
    """Yield replacements that others have put in the place of PyTorch's own functions.

    `classes`: of modules; their methods are looked at as well as the methods of tensors.
    """
    home = torch.__path__[0]
    kinds = (torch.Tensor, torch.nn.Module, *classes)
    bases = dict.fromkeys(base for kind in kinds for base in kind.__mro__)
    names = ("torch", "torch.functional", "torch.nn.functional", "torch.nn.init")
    spaces: list[tuple[str, Any]] = [(name, vars(sys.modules[name])) for name in names]
    own = (base for base in bases if base.__module__.partition(".")[0] == "torch")
    spaces += [(f"{base.__module__}.{base.__qualname__}", vars(base)) for base in own]
    for space, held in spaces:
        for name, value in list(held.items()):
            if _is_of_others(value, home):
                yield f"{space}.{name}", value


def _is_of_others(value: Any, home: str) -> bool:
    if isinstance(value, staticmethod | classmethod | types.MethodType):
        value = value.__func__
    if isinstance(value, types.FunctionType):
        return not value.__code__.co_filename.startswith((home, "<"))
    maker = type(value).__module__.partition(".")[0]
    return callable(value) and maker not in ("builtins", "torch", "typing")


def lazy_modules() -> AbstractContextManager[None]:
    """Return a context in which PyTorch makes modules of graphs as `lazy_module` does."""
    return _use_lazy_graph_module(True)


def lazy_module(
    root: torch.nn.Module | dict[str, Any], graph: torch.fx.Graph
) -> torch.fx.GraphModule:
    """Return a module that runs a graph, whose code is written when it is first called.

    `root`: has the constants of the graph.
    """
    with lazy_modules():
        return _make_graph_module(root, graph)


def name_of_function(function: Any) -> str | None:
    """Return the name under which PyTorch or Python hold a function; None: it is another's."""
    try:
        name = _get_qualified_name(function)
    except (AttributeError, RuntimeError):
        return None
    is_it = function_named(name) is function and not isinstance(function, type)
    return name if is_it and not _is_of_others(function, torch.__path__[0]) else None


def function_named(name: str) -> Any:
    """Return the object of PyTorch or Python with a name; None if there is none."""
    root, *rest = name.split(".")
    if not rest:
        return vars(builtins).get(root)
    found: Any = sys.modules.get(root) if root in _ROOTS else None
    for part in rest:
        found = getattr(found, part, None)
    return found


_ROOTS = ("torch", "_operator", "operator", "math")
