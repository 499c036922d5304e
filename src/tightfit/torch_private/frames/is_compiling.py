"""Code that asks whether it is compiled is followed as plain PyTorch runs it. Private names."""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._dynamo import external_utils, symbolic_convert
from torch._dynamo.variables import ConstantVariable, TensorVariable
from torch._dynamo.variables.functions import SkipFunctionVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch.utils._python_dispatch import _disable_current_modes

from tightfit.torch_private.patches import Patch


class AnswerChanged(BaseException):
    """Ends following: a graph would end in code that runs only where it is not compiled."""


class Answers:
    """The answers to code outside of PyTorch that asks whether it is compiled, in one frame.

    No, as in plain PyTorch; but yes to those of libraries that would then end the graph.

    `looks_at_data`: the file and line of the first caller that got "yes" because of data; "": there
    is none.
    """

    def __init__(self) -> None:
        self.looks_at_data = ""
        self._compiled: set[str] = set()  # callers that get "yes"
        self._asked: list[str] = []
        self._end: str | None = None  # why following ended before any caller got "yes"

    def around(self) -> contextlib.AbstractContextManager[None]:
        self._asked = []
        return _answering(self._answer)

    def change(self, end: str) -> bool:
        """Answer yes to the last caller, if it was no; return whether to follow once more.

        `end`: why following would end. If it is why it would have before, none is the cause.
        """
        refused = [place for place in self._asked if place not in self._compiled]
        if not refused or end == self._end:
            return False
        self._end = end
        self._compiled.add(refused[-1])
        if end.startswith(_OF_DATA):
            self.looks_at_data = self.looks_at_data or refused[-1]
        return True

    def _answer(self, file: str, line: int) -> bool:
        package = file.rpartition(_PACKAGES)[2]
        place = f"{package}:{line}"
        if package != file:
            self._asked.append(place)
        return place in self._compiled


_OF_DATA = ("Data-dependent branching", "generic_jump")
_PACKAGES = f"site-packages{os.sep}"


@contextlib.contextmanager
def _answering(is_compiled: Callable[[str, int], bool]) -> Iterator[None]:
    """Answer code outside of PyTorch, and of ours, that asks whether it is compiled.

    Where plain PyTorch would look at a tensor that no input decides, its value is computed.

    `is_compiled`: given the file and line of the caller, returns the answer.
    """

    def answer(go_on: Any, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if _asks_of_capturing(self.value):
            return ConstantVariable.create(_CAPTURING[self.value]())
        own = tx.f_code.co_filename.startswith(_OWN)
        if own or not any(self.value is question for question in _QUESTIONS):
            return go_on(self, tx, args, kwargs)
        asking = tx
        while asking.parent is not None and asking.f_code.co_name.startswith("is_"):
            asking = asking.parent  # the caller of `is_tracing`, say
        answered = is_compiled(asking.f_code.co_filename, asking.lineno)
        return ConstantVariable.create(answered)

    def skipped(go_on: Any, self: Any, *args: Any) -> Any:
        if _asks_of_capturing(self.value):
            return ConstantVariable.create(_CAPTURING[self.value]())
        return go_on(self, *args)

    def is_known(go_on: Any, self: Any) -> bool:
        return go_on(self) or (_decides_a_jump() and _value_of(self.proxy.node) is not None)

    def known(go_on: Any, self: Any) -> Any:
        value = _value_of(self.proxy.node) if _decides_a_jump() else None
        return go_on(self) if value is None else value

    with _CALL.by(answer), _SKIPPED.by(skipped), _IS_CONSTANT.by(is_known), _CONSTANT.by(known):
        yield


_QUESTIONS: tuple[Any, ...] = (
    torch.compiler.is_compiling,
    torch.compiler.is_dynamo_compiling,
    external_utils.is_compiling,
    getattr(torch._utils, "is_compiling", None),
)
_CALL = Patch(TorchInGraphFunctionVariable, "call_function")
_SKIPPED = Patch(SkipFunctionVariable, "call_function")
_IS_CONSTANT = Patch(TensorVariable, "is_python_constant")
_CONSTANT = Patch(TensorVariable, "as_python_constant")
_OWN = tuple(
    f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[2])
)
"""The folders of PyTorch and tightfit: they ask because they know that Dynamo follows."""


def _is_capturing(device: Any) -> bool:
    """Whether a stream of a device is captured now; PyTorch's own fails where there is none."""
    return bool(device.is_available() and device.is_current_stream_capturing())


_CAPTURING: dict[Any, Callable[[], bool]] = {
    device.is_current_stream_capturing: functools.partial(_is_capturing, device)
    for device in (torch.cuda, torch.xpu)
    if hasattr(device, "is_current_stream_capturing")
}


def _asks_of_capturing(function: Any) -> bool:
    """Whether a function tells whether a stream of a device is captured."""
    return any(function is each for each in _CAPTURING)


def _decides_a_jump() -> bool:
    """Whether Dynamo asks because a jump depends on it, which keeps nothing of the tensor."""
    frame = sys._getframe(3)  # behind this frame, its caller, and the patch around that
    is_jump = frame.f_code.co_name == "inner" and frame.f_globals is vars(symbolic_convert)
    return is_jump and frame.f_locals["inst"].opname.startswith("POP_JUMP")


def _value_of(node: fx.Node) -> bool | None:
    """Return whether a tensor is true that no input decides; None: one does, or chance."""
    if _KNOWN not in node.meta:
        with _disable_current_modes(), torch.no_grad():
            try:
                value = _computed(node, {})
                node.meta[_KNOWN] = bool(value) if value.numel() == 1 else None
            except (_Decided, RuntimeError):
                node.meta[_KNOWN] = None
    return node.meta[_KNOWN]


_KNOWN = "true for tightfit"


class _Decided(Exception):
    """Something from outside a graph decides a value, or something changes it."""


def _computed(node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    """Return the value of a node of a graph that Dynamo is making."""
    if node in known:
        return known[node]
    if node.op not in ("call_function", "call_method") or any(map(_changes, node.users)):
        raise _Decided
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: _computed(n, known))
    target: Any = node.target
    if _changes(node) or any(word in _name_of(node) for word in _OF_CHANCE):
        raise _Decided
    function = target if callable(target) else functools.partial(_call_method, target)
    known[node] = function(*args, **kwargs)
    return known[node]


def _call_method(name: str, owner: Any, *args: Any, **kwargs: Any) -> Any:
    return getattr(owner, name)(*args, **kwargs)


def _changes(node: fx.Node) -> bool:
    name = _name_of(node)
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or node.target is operator.setitem or name in _IN_PLACE or "out" in node.kwargs


def _name_of(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


_OF_CHANCE = ("rand", "normal", "bernoulli", "multinomial", "dropout", "poisson", "binomial")
_OPERATORS = frozenset(dir(operator))
_IN_PLACE = frozenset(n for n in _OPERATORS if n.startswith("i") and n[1:] in _OPERATORS)
