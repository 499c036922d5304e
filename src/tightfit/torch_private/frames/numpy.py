"""NumPy's functions, which Dynamo would do with operators of PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy
from torch import fx
from torch._dynamo import utils
from torch._dynamo.variables import ConstantVariable, misc

from tightfit.torch_private.patches import Patch


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


def numbers_computed() -> contextlib.AbstractContextManager[None]:
    """Return a context in which Dynamo calls NumPy's functions of numbers, such as those of sizes.

    It would write them into the graph, and end the graph where the result becomes an integer.
    """
    return _CALLED.by(_with_numbers)


_CALLED = Patch(misc.NumpyVariable, "call_function")
_NUMBERS = (bool, int, float)
_COMPUTED = (*_NUMBERS, numpy.bool_, numpy.int64, numpy.float64)  # PyTorch takes them alike


def _with_numbers(
    original: Callable[..., Any], called: Any, tx: Any, args: Any, kwargs: Any
) -> Any:
    """Return the number that a function computes of numbers, or else what Dynamo makes of it."""
    known = misc.get_np_to_tnp_map().get(called.value)
    is_random = known is None or known.__module__ == "torch._numpy.random"
    if not is_random and all(map(_is_of_numbers, (*args, *kwargs.values()))):
        given = [each.as_python_constant() for each in args]
        named = {name: each.as_python_constant() for name, each in kwargs.items()}
        with contextlib.suppress(ValueError, TypeError):  # Dynamo says what is wrong
            made = called.value(*given, **named)
            if type(made) in _COMPUTED:
                return ConstantVariable.create(made.item() if hasattr(made, "item") else made)
    return original(called, tx, args, kwargs)


def _is_of_numbers(variable: Any) -> bool:
    """Whether an argument is a number or a sequence of them, known while a graph is captured."""
    if not variable.is_python_constant():
        return False
    value = variable.as_python_constant()
    items = value if isinstance(value, tuple | list) else (value,)
    return all(type(item) in _NUMBERS for item in items)
