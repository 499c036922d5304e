"""A callable whose Python Dynamo follows, where it is."""

from __future__ import annotations

import contextlib
import gc
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Protocol

from torch import nn

from tightfit.capture.exclusive import CAPTURE_LOCK
from tightfit.capture.opaque.leaves import leaf_forwards
from tightfit.capture.opaque.only_computes import only_computes
from tightfit.capture.trace.garbage import fewer_collections
from tightfit.dynamo.backend import HandOver, backend_of
from tightfit.dynamo.frame_cache import FrameCache
from tightfit.dynamo.guards import Unguarded
from tightfit.dynamo.one_ops import OneOps
from tightfit.dynamo.outside import Outside
from tightfit.errors import CaptureError
from tightfit.torch_private import dynamo as private


class Following(private.Follower):
    """Answers questions of Dynamo while it follows a callable.

    `outside`: notes frames left to Python. `account`: has a limit that does not apply to Dynamo's
    own memory. `one_ops`: decides which modules run as one op without being marked.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        outside: Outside,
        account: Unlimited,
        one_ops: OneOps | None = None,
    ) -> None:
        self._modules = modules
        self._account = account
        self._left_out: set[nn.Module] = set()
        self._call: tuple[int, Any] = (0, None)
        self._outside = outside
        self._one_ops = one_ops
        self.unguarded = Unguarded(modules)

    def call(self) -> tuple[int, Any]:
        return self._call

    def begin(self, given: Any) -> None:
        self._call = self._call[0] + 1, given

    def end(self) -> None:
        self._call = self._call[0], None

    def entered_inner_frame(self) -> None:
        self._outside.entered_inner_frame()

    def skipped(
        self, code: types.CodeType, module: nn.Module | None, reason: str, error: Exception | None
    ) -> None:
        self._outside.skipped(code, module, reason, error)

    def modules(self) -> Iterable[nn.Module]:
        return self._modules.values()

    def left_out(self) -> Set[nn.Module]:
        return self._left_out

    def leave_out(self, module: nn.Module) -> None:
        """Let the forward of a module run as plain Python in graphs that are made from now on."""
        self._left_out.add(module)

    def leaves(self) -> Mapping[Any, Callable[..., Any]]:
        left_out = {type(module).forward for module in self._left_out}
        found = leaf_forwards(self._modules)
        return {forward: call for forward, call in found.items() if forward not in left_out}

    def one_op_at(self, places: Sequence[tuple[str, int]]) -> Any:
        if self._one_ops is None:
            return None
        found = self._one_ops.at(places)
        return None if found in {type(module).forward for module in self._left_out} else found

    def try_as_one_op(self, forward: Any, given: private.Given | None) -> None:
        """Decide whether a forward is one op from now on; memory for that is within the limit."""
        assert self._one_ops is not None
        self._account.enforce()
        try:
            self._one_ops.decide(forward, given is not None and only_computes(given))
        finally:
            self._account.lift_limit()
        gc.collect()  # frames that were looked at hold tensors in cycles

    def follow_all_again(self) -> bool:
        """Follow modules that were decided to be one op; return whether there are any."""
        return self._one_ops is not None and self._one_ops.follow_all_again()

    def runs_as_compiled(self, place: str) -> None:
        self._outside.runs_as_compiled(place)

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Let the limit rest: Dynamo looks at shapes only. What it leaves in cycles is freed.

        Errors in frames hold tensors: such garbage, freed while a graph waits for its backward,
        would hide memory of the loss.
        """
        self.unguarded.look()
        self._account.lift_limit()
        try:
            with CAPTURE_LOCK, fewer_collections():
                yield
        finally:
            self._account.enforce()


class Unlimited(Protocol):
    """An object with a limit that may rest."""

    def lift_limit(self) -> None:
        """Refuse nothing."""

    def enforce(self) -> None:
        """Refuse requests above the limit again."""


class Compiled:
    """Runs a callable through Dynamo.

    `function`: a module's own forward, another method of it, or a function. `hand_over`: given a
    graph, returns a callable that runs it where a backward may follow. `follower`: consulted while
    Dynamo follows the callable. `kept`: keeps Dynamo's results for other processes. Raises
    `BadInput` if this PyTorch is too old for that.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        hand_over: HandOver,
        follower: Following,
        kept: FrameCache | None = None,
    ) -> None:
        self._function = function
        self._name = name
        self._hand_over = hand_over
        self._follower = follower
        self._kept = kept
        self._compiled: dict[int, Callable[..., Any]] = {}
        self._last_key = -1
        self._last: Callable[..., Any] = function
        self._unguarded = follower.unguarded

    def start_over(self) -> None:
        """Make all graphs again."""
        self._compiled.clear()

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the callable.

        Raises `CaptureError` if Dynamo makes ever new graphs of it.
        """
        key = self._unguarded.now()
        if key != self._last_key or not self._compiled:
            self._last = self._compiled.get(key) or self._made_for(key)
            self._last_key = key
        function = self._last
        self._follower.begin((args, kwargs))
        try:
            while True:
                try:
                    return function(*args, **kwargs)
                except Exception as error:
                    if private.is_traced_meanwhile(error):
                        with CAPTURE_LOCK:
                            continue
                    elif private.is_limit_of_graphs(error):
                        raise _too_many_graphs(self._name) from error
                    else:
                        raise
        finally:
            self._follower.end()

    def _made_for(self, key: int) -> Callable[..., Any]:
        function = _current_method(self._function)
        function = private.compiled(
            function, backend_of(self._hand_over), self._follower, self._kept
        )
        self._compiled[key] = function
        return function


def _current_method(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of a module as its class has it now; other callables as they are."""
    owner = getattr(function, "__self__", None)
    if not isinstance(owner, nn.Module) or owner.__dict__.get(function.__name__) is function:
        return function
    return types.MethodType(getattr(type(owner), function.__name__), owner)


def _too_many_graphs(name: str) -> CaptureError:
    return CaptureError(
        f"{name} runs other operators in ever new calls: Dynamo has made as many graphs of it as "
        "it may. Way out: fit parts of it that never change (methods=, or inner modules), "
        "or pass the changing values as tensors"
    )
