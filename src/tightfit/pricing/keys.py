"""Names of calls: calls that cost the same have equal names."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import fx

from tightfit.capture.captured import Call
from tightfit.capture.opaque.ops import OpaqueBackward, OpaqueForward
from tightfit.capture.stepping.predicted import PredictedOp
from tightfit.costs.measured.call import call_key
from tightfit.torch_private import core as private

_PLACES: dict[str, tuple[int, ...]] = {
    "aten::select_backward": (3,),
    "aten::select_scatter": (3,),
    "aten::slice_backward": (3, 4),
    "aten::slice_scatter": (3, 4),
}
"""Arguments that only say where in a larger tensor a smaller tensor goes: they cost nothing."""


def is_opaque(call: Call) -> bool:
    """Whether a call runs an opaque module, or the optimizer: it names its cost itself."""
    return isinstance(call.function, OpaqueForward | OpaqueBackward | PredictedOp)


def name_of(function: Any) -> str:
    if isinstance(function, private.OpOverload):
        return function.name()
    if isinstance(function, OpaqueForward | OpaqueBackward):
        return f"opaque module {function.call.title}"
    if isinstance(function, PredictedOp):
        return repr(function)
    return f"{function.__module__}.{function.__qualname__}"


def key_of(call: Call) -> str:
    """Return a text that is equal for calls that cost the same; see `call_key`."""
    known = _KEYS.get(call)
    if known is None:
        known = _KEYS[call] = _new_key(call)
    return known


_KEYS: WeakKeyDictionary[Call, str] = WeakKeyDictionary()
"""The keys of calls that were asked for: shapes of their arguments do not change."""


def _new_key(call: Call) -> str:
    if is_opaque(call):
        return f"this process: {call.function!r}"
    name = name_of(call.function)
    args, kwargs = fx.map_arg(
        (call.args, call.kwargs), lambda node: node.meta.get("val", node.target)
    )
    places = _PLACES.get(name, ())
    args = tuple("anywhere" if n in places else x for n, x in enumerate(args))
    return call_key(name, args, kwargs)
