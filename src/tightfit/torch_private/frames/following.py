"""Changes of Dynamo beyond its configuration while it follows. Private names of torch."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo import config, guards
from torch._dynamo.exc import Unsupported, unimplemented
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.variables import ConstantVariable, TensorVariable, TupleVariable
from torch._dynamo.variables.functions import (
    CollectiveFunctionRewriteVariable,
    UserMethodVariable,
)
from torch._dynamo.variables.lists import BaseListVariable
from torch._dynamo.variables.misc import (
    AutogradFunctionContextVariable,
    LoggingLoggerVariable,
    RandomVariable,
)
from torch._dynamo.variables.optimizer import OptimizerVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._dynamo.variables.user_defined import UserDefinedTupleVariable

from tightfit.torch_private.patches import Patch


class DerivativeOutside(BaseException):
    """Ends following: a graph would end at the derivative of a value it has computed itself.

    Of its outputs none is computed from another for autograd, so Python would find no way from the
    differentiated output to the tensor it is differentiated by.
    """

    def __init__(self, reason: str, *, is_in_frame: bool) -> None:
        super().__init__(reason)
        self.reason, self.is_in_frame = reason, is_in_frame


def follows_derivatives() -> bool:
    """Whether this PyTorch has derivatives inside a forward in its graphs."""
    return hasattr(OutputGraph, _CHECK_NAME)


@contextlib.contextmanager
def following_for_plans() -> Iterator[None]:
    """Have Dynamo follow as plans need it."""
    with (
        _derivatives_inside(),
        _derivatives_outside(),
        _changing_functions_left_to_python(),
        _messages_said_once(),
        _signs_of_zeros(),
        _own_numbers_drawn_by_python(),
        _collectives_left_to_python(),
        _optimizers_left_to_python(),
        _quotients_as_one_operator(),
        _named_tuples_of_values(),
        _guards_not_timed(),
    ):
        yield


@contextlib.contextmanager
def _signs_of_zeros() -> Iterator[None]:
    """Have Dynamo tell 0.0 from -0.0, which are equal."""

    def have_equal_signs(are_equal: Any, self: Any, guard: Any, *args: Any, **kwargs: Any) -> None:
        are_equal(self, guard, *args, **kwargs)
        value = self.get(guard)
        if type(value) is float and value == 0:
            sign = math.copysign(1, value)
            self.get_guard_manager(guard).add_lambda_guard(
                lambda now: math.copysign(1, now) == sign,
                guards.get_verbose_code_parts(f"the sign of {value}", guard),
                guard.user_stack,
            )

    with _EQUALS.by(have_equal_signs):
        yield


@contextlib.contextmanager
def _own_numbers_drawn_by_python() -> Iterator[None]:
    """Have a `random.Random` that the user made end a graph where it draws.

    Dynamo would draw in every call the numbers drawn while it followed the first.
    """
    with _SUPPORTED_GENERATORS.by(lambda is_supported, value: False):
        yield


@contextlib.contextmanager
def _collectives_left_to_python() -> Iterator[None]:
    """Have calls that talk to other ranks end a graph.

    Dynamo would put functions in its place that have other gradients.
    """
    with _REWRITTEN_COLLECTIVES.by(lambda can_rewrite, function: False):
        yield


@contextlib.contextmanager
def _optimizers_left_to_python() -> Iterator[None]:
    """Have calls of an optimizer's methods end a graph.

    Dynamo would follow the way of a step that is captured on a GPU, which rounds differently.
    """

    def called(call: Any, self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.obj, OptimizerVariable):
            unimplemented(
                gb_type="method of an optimizer",
                context=f"{type(self.obj.value).__name__}.{self.get_name()}",
                explanation="an optimizer is left to Python",
                hints=[],
            )
        return call(self, tx, *args, **kwargs)

    with _CALL_OF_METHOD.by(called):
        yield


@contextlib.contextmanager
def _quotients_as_one_operator() -> Iterator[None]:
    """Have ``torch.addcdiv`` stay one operator: the three that Dynamo makes of it round
    differently.

    The other operators that it splits stay whole by its configuration.
    """

    with _other_handlers(lambda own: {f: own[f] for f in own if f is not torch.addcdiv}):
        yield


def _other_handlers(
    change: Callable[[dict[Any, Any]], dict[Any, Any]],
) -> contextlib.AbstractContextManager[None]:
    """Have Dynamo follow calls of some of PyTorch's functions by other handlers.

    `change`: given its handlers by function, returns those in their place.
    """

    @functools.cache
    def handlers(get: Callable[[], dict[Any, Any]]) -> dict[Any, Any]:
        return change(get())

    return _HANDLERS.by(handlers)


@contextlib.contextmanager
def _named_tuples_of_values() -> Iterator[None]:
    """Have a tuple of a class of its own be made again of its elements, not of an iterator.

    `_replace` of a named tuple hands over an iterator, which is empty once Dynamo has followed it.
    """

    def made(
        make: Any, self: Any, value: Any, tuple_vt: Any = None, init_args: Any = None, **others: Any
    ) -> None:
        make(self, value, tuple_vt=tuple_vt, init_args=init_args, **others)
        if tuple_vt is None and init_args:
            elements = getattr(self, "_base_vt", None) or self._tuple_vt  # the latter on 2.11
            self.init_args = [TupleVariable([*elements.items])]

    with _MAKE_TUPLE.by(made):
        yield


@contextlib.contextmanager
def _derivatives_inside() -> Iterator[None]:
    """Have derivatives by `torch.autograd.grad` be part of a graph, but not ``backward()``.

    So may values computed from a tensor that becomes a leaf inside, for graphs are traced together
    with their derivatives. Not so a leaf that is returned, whose gradient may be asked for. PyTorch
    before 2.13 cannot: there they end a graph.
    """
    if not follows_derivatives():
        yield
        return

    def left_to_python(backward: Any, *args: Any, **kwargs: Any) -> Any:
        with config.patch(trace_autograd_ops=False):
            return backward(*args, **kwargs)

    def checked(check: Any, self: Any, returned: list[Any], tx: Any) -> None:
        nodes = {x.as_proxy().node for x in returned if isinstance(x, TensorVariable)}
        leaves = (x for x in self.leaf_var_creation_order if isinstance(x, TensorVariable))
        if not nodes.isdisjoint(x.as_proxy().node for x in leaves):
            check(self, returned, tx)

    with (
        _BACKWARD.by(left_to_python),
        _CHECKED_OUTPUTS.by(checked),
        config.patch(trace_autograd_ops=True),
    ):
        yield


@contextlib.contextmanager
def _derivatives_outside() -> Iterator[None]:
    """Have following end where a graph would end at a derivative by values of the graph."""

    def derivative(handle: Any, self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return handle(self, tx, *args, **kwargs)
        except Unsupported as error:
            by = args[1] if len(args) > 1 else kwargs.get("inputs")
            if by is None or not _are_computed(by):
                raise
            reason = str(error).strip().partition("\n")[0]
            raise DerivativeOutside(reason, is_in_frame=tx.parent is None) from None

    grad = torch.autograd.grad
    with _other_handlers(lambda own: {**own, grad: functools.partial(derivative, own[grad])}):
        yield


def _are_computed(variables: Any) -> bool:
    """Whether a graph has computed any of these tensors."""
    each = variables.items if isinstance(variables, BaseListVariable) else [variables]
    return any(
        isinstance(x, TensorVariable) and x.as_proxy().node.op != "placeholder" for x in each
    )


@contextlib.contextmanager
def _changing_functions_left_to_python() -> Iterator[None]:
    """Have an `autograd.Function` that says it changes its input (``mark_dirty``) end a graph.

    Where that is an input of the graph, Dynamo would have its gradient wrong.
    """

    def called(call_method: Any, self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        asked = "mark_dirty, of an input" if name == "mark_dirty" else name
        return call_method(self, tx, asked, args, kwargs)

    with _CALL_OF_CONTEXT.by(called):
        yield


@contextlib.contextmanager
def _messages_said_once() -> Iterator[None]:
    """Have a logger's messages that are said only once be said while they are followed.

    Those are said by methods that remember their calls (`functools.lru_cache`), as transformers
    has them. Other messages end a graph.
    """

    def called(
        call_method: Any, self: Any, tx: Any, name: str, args: list[Any], kwargs: dict[str, Any]
    ) -> Any:
        method = getattr(self.value, name, None)
        is_once = isinstance(getattr(method, "__func__", None), functools._lru_cache_wrapper)
        if not is_once or not all(x.is_python_constant() for x in (*args, *kwargs.values())):
            return call_method(self, tx, name, args, kwargs)
        said = {key: x.as_python_constant() for key, x in kwargs.items()}
        method(*(x.as_python_constant() for x in args), **said)
        return ConstantVariable.create(None)

    with _CALL_OF_LOGGER.by(called):
        yield


@contextlib.contextmanager
def _guards_not_timed() -> Iterator[None]:
    """Have Dynamo not measure the time of its guards: for that it empties the processor's cache."""
    with _PROFILED_GUARDS.by(lambda *_: 0.0):
        yield


_CHECK_NAME = "_check_requires_grad_intermediate_outputs"
_PROFILED_GUARDS = Patch(guards, "profile_guard_manager")
_EQUALS = Patch(guards.GuardBuilder, "EQUALS_MATCH")
_SUPPORTED_GENERATORS = Patch(RandomVariable, "is_supported_random_obj")
_REWRITTEN_COLLECTIVES = Patch(CollectiveFunctionRewriteVariable, "can_rewrite")
_BACKWARD = Patch(TensorVariable, "method_backward")
_CHECKED_OUTPUTS = Patch(OutputGraph, _CHECK_NAME)
_MAKE_TUPLE = Patch(UserDefinedTupleVariable, "__init__")
_HANDLERS = Patch(TorchInGraphFunctionVariable, "_get_handlers")
_CALL_OF_CONTEXT = Patch(AutogradFunctionContextVariable, "call_method")
_CALL_OF_METHOD = Patch(UserMethodVariable, "call_function")
_CALL_OF_LOGGER = Patch(LoggingLoggerVariable, "call_method")
