"""NumPy's functions of tensors, which Dynamo would do with operators of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch._dynamo import utils


class NumpyFollowed(Exception):
    """Says of a graph that it holds operators of PyTorch in the place of NumPy's."""


def without_numpy(backend: Callable[..., Any]) -> Callable[..., Any]:
    """Return a backend that refuses NumPy's functions of tensors: PyTorch's round differently."""

    def checked(module: fx.GraphModule, inputs: Any) -> Any:
        nodes = module.graph.nodes
        if any(isinstance(n.target, _AS_NUMPY) and n.all_input_nodes for n in nodes):
            raise NumpyFollowed
        return backend(module, inputs)

    return checked


_AS_NUMPY = (
    utils.numpy_to_tensor_wrapper,
    utils.numpy_method_wrapper,
    utils.numpy_operator_wrapper,
)
