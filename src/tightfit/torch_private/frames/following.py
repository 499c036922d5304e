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

from tightfit.torch_private.frames.resumed import ending_frames_at_breaks
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
        ending_frames_at_breaks(),
        _other_handlers(_ending_at_derivatives),
        _CALL_OF_CONTEXT.by(_ending_at_changed_inputs),
        _CALL_OF_LOGGER.by(_saying_once),
        _EQUALS.by(_with_sign_of_zero),
        # a `random.Random` that the user made ends a graph where it draws: Dynamo would draw in
        # every call the numbers drawn while it followed the first
        _SUPPORTED_GENERATORS.by(lambda is_supported, value: False),
        # calls that talk to other ranks end a graph: Dynamo's functions in their place have other
        # gradients
        _REWRITTEN_COLLECTIVES.by(lambda can_rewrite, function: False),
        _CALL_OF_METHOD.by(_ending_at_optimizers),
        # stays one operator, as others by Dynamo's configuration: the three that Dynamo makes of it
        # round differently
        _other_handlers(lambda own: {f: own[f] for f in own if f is not torch.addcdiv}),
        _MAKE_TUPLE.by(_made_of_elements),
        # the time of guards is not measured: for that Dynamo empties the processor's cache
        _PROFILED_GUARDS.by(lambda *_: 0.0),
    ):
        yield


def _with_sign_of_zero(are_equal: Any, self: Any, guard: Any, *args: Any, **kwargs: Any) -> None:
    """Guard a number and the sign of a zero: 0.0 and -0.0 are equal."""
    are_equal(self, guard, *args, **kwargs)
    value = self.get(guard)
    if type(value) is float and value == 0:
        sign = math.copysign(1, value)
        self.get_guard_manager(guard).add_lambda_guard(
            lambda now: math.copysign(1, now) == sign,
            guards.get_verbose_code_parts(f"the sign of {value}", guard),
            guard.user_stack,
        )


def _ending_at_optimizers(call: Any, self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    """Have calls of an optimizer's methods end a graph.

    Dynamo would follow the way of a step that is captured on a GPU, which rounds differently.
    """
    if isinstance(self.obj, OptimizerVariable):
        unimplemented(
            gb_type="method of an optimizer",
            context=f"{type(self.obj.value).__name__}.{self.get_name()}",
            explanation="an optimizer is left to Python",
            hints=[],
        )
    return call(self, tx, *args, **kwargs)


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


def _made_of_elements(
    make: Any, self: Any, value: Any, tuple_vt: Any = None, init_args: Any = None, **others: Any
) -> None:
    """Have a tuple of a class of its own be made again of its elements, not of an iterator.

    `_replace` of a named tuple hands over an iterator, which is empty once Dynamo has followed it.
    """
    make(self, value, tuple_vt=tuple_vt, init_args=init_args, **others)
    if tuple_vt is None and init_args:
        elements = getattr(self, "_base_vt", None) or self._tuple_vt  # the latter on 2.11
        self.init_args = [TupleVariable([*elements.items])]


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
    with (
        _BACKWARD.by(_left_to_python),
        _CHECKED_OUTPUTS.by(_check_returned_leaves),
        config.patch(trace_autograd_ops=True),
    ):
        yield


def _left_to_python(backward: Any, *args: Any, **kwargs: Any) -> Any:
    with config.patch(trace_autograd_ops=False):
        return backward(*args, **kwargs)


def _check_returned_leaves(check: Any, self: Any, returned: list[Any], tx: Any) -> None:
    nodes = {x.as_proxy().node for x in returned if isinstance(x, TensorVariable)}
    leaves = (x for x in self.leaf_var_creation_order if isinstance(x, TensorVariable))
    if not nodes.isdisjoint(x.as_proxy().node for x in leaves):
        check(self, returned, tx)


def _ending_at_derivatives(own: dict[Any, Any]) -> dict[Any, Any]:
    """Return handlers with which following ends where a graph would end at a derivative.

    That is one by values that the graph has computed.
    """
    handle = own[torch.autograd.grad]

    def derivative(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return handle(self, tx, *args, **kwargs)
        except Unsupported as error:
            by = args[1] if len(args) > 1 else kwargs.get("inputs")
            if by is None or not _are_computed(by):
                raise
            reason = str(error).strip().partition("\n")[0]
            raise DerivativeOutside(reason, is_in_frame=tx.parent is None) from None

    return {**own, torch.autograd.grad: derivative}


def _are_computed(variables: Any) -> bool:
    """Whether a graph has computed any of these tensors."""
    each = variables.items if isinstance(variables, BaseListVariable) else [variables]
    return any(
        isinstance(x, TensorVariable) and x.as_proxy().node.op != "placeholder" for x in each
    )


def _ending_at_changed_inputs(
    call_method: Any, self: Any, tx: Any, name: str, args: Any, kwargs: Any
) -> Any:
    """Have an `autograd.Function` that says it changes its input (``mark_dirty``) end a graph.

    Where that is an input of the graph, Dynamo would have its gradient wrong.
    """
    asked = "mark_dirty, of an input" if name == "mark_dirty" else name
    return call_method(self, tx, asked, args, kwargs)


def _saying_once(
    call_method: Any, self: Any, tx: Any, name: str, args: list[Any], kwargs: dict[str, Any]
) -> Any:
    """Have a logger's messages that are said only once be said while they are followed.

    Those are said by methods that remember their calls (`functools.lru_cache`), as transformers
    has them. Other messages end a graph.
    """
    method = getattr(self.value, name, None)
    is_once = isinstance(getattr(method, "__func__", None), functools._lru_cache_wrapper)
    if not is_once or not all(x.is_python_constant() for x in (*args, *kwargs.values())):
        return call_method(self, tx, name, args, kwargs)
    said = {key: x.as_python_constant() for key, x in kwargs.items()}
    method(*(x.as_python_constant() for x in args), **said)
    return ConstantVariable.create(None)


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
