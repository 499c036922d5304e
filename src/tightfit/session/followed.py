"""Calls of a callable whose Python Dynamo follows: each hands over its graphs."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from tightfit.capture.calls.structure import Arguments
from tightfit.capture.handed import GraphArguments, HandedGraph
from tightfit.capture.opaque.mark import is_opaque
from tightfit.dynamo.backend import handing_over_to
from tightfit.dynamo.compiled import Compiled, Following
from tightfit.dynamo.frame_cache import FrameCache
from tightfit.dynamo.one_ops import OneOps
from tightfit.dynamo.single_graph import GraphHandedOver, refuse_break, without_graph
from tightfit.errors import CaptureError
from tightfit.session.callee import Callee
from tightfit.session.handed_calls import HandedCalls
from tightfit.session.memory.account import Account


class _RestartCall(BaseException):
    """Ends a call of which nothing has run yet: it starts over with other graphs."""


class FollowedCalls(HandedCalls):
    """Calls of a callable whose Python Dynamo follows.

    `keeps`: whether Dynamo's results are kept for other processes. `times_followed`: how many
    frames Dynamo has followed so far.
    """

    def __init__(self, callee: Callee, account: Account, *, keeps: bool) -> None:
        super().__init__(callee)
        self._modules = callee.modules
        self._one_ops = OneOps(callee.modules)
        self._follower = Following(callee.modules, self.outside, weakref.proxy(self), self._one_ops)
        hand_over = handing_over_to(weakref.WeakMethod(self._called))
        kept = FrameCache(callee.modules, hand_over) if keeps else None
        self._compiled = Compiled(callee.function, callee.name, hand_over, self._follower, kept)
        self._account = account
        self._unmeasured_frames = contextlib.ExitStack()
        self._inspects: Callable[[HandedGraph, Sequence[Any]], Any] | None = None
        self._has_run = False  # a graph of the current call
        self.times_followed = 0

    def lift_limit(self) -> None:
        """Neither refuse nor measure the memory that Dynamo takes to follow a frame."""
        self.times_followed += 1
        self._account.lift_limit()
        runner = self._runner()
        if runner is not None:
            self._unmeasured_frames.enter_context(runner.unmeasured())

    def enforce(self) -> None:
        """Refuse and measure again."""
        self._unmeasured_frames.close()
        self._account.enforce()

    def _run_call(self, given: Arguments) -> Any:
        self._has_run = False
        self.outside.watch(self.graphs.takes)
        while True:
            try:
                return self._compiled(given.args, dict(given.kwargs))
            except _RestartCall:
                continue

    def inspect(self, given: Arguments, function: Callable[[GraphArguments], Any]) -> Any:
        """Return the value of a function of the only graph of a call, which does not run.

        Raises `CaptureError` if the call is no single graph.
        """

        def inspects(graph: HandedGraph, inputs: Sequence[Any]) -> Any:
            refuse_break(graph)
            try:
                return function(self.graphs.arguments(graph, inputs))
            except CaptureError:
                self._follow_again(graph)
                raise

        self._inspects, self._has_run = inspects, False
        try:
            while True:
                try:
                    self._compiled(given.args, dict(given.kwargs))
                except _RestartCall:
                    continue
                break
        except GraphHandedOver as ended:
            return ended.answer
        finally:
            self._inspects = None
        raise without_graph(self.name, self._modules)

    def one_ops(self) -> list[str]:
        return self._one_ops.names()

    def _follow_again(self, graph: HandedGraph) -> None:
        """Follow the modules of a graph that run as one op without being marked.

        Raises `_RestartCall` if there are any, and nothing of the call has run yet.
        """
        leaves = graph.leaves() if graph.leaf_calls else ()
        is_left = any(not is_opaque(leaf) for leaf in leaves)  # of a module that was one op
        calls = bool(leaves) or graph.hides_leaf_calls
        if (calls and self._follower.follow_all_again()) or is_left:
            self._compiled.start_over()
            if not self._has_run:
                raise _RestartCall from None

    def _called(self, graph: HandedGraph, inputs: Sequence[Any]) -> Any:
        """Run a call of a graph, or inspect it."""
        if graph.hides_leaf_calls:
            self._follow_again(graph)
        if self._inspects is not None:
            raise GraphHandedOver(self._inspects(graph, inputs))
        output = super()._called(graph, inputs)
        self._has_run = True
        return output

    def _unguarded(self) -> Any:
        """Return values that graphs depend on and that Dynamo does not guard."""
        return self._follower.unguarded.now()

    def _leave_out(self, graph: HandedGraph, error: Exception) -> None:
        """Do without a plan of a graph.

        Where a module is the cause, later calls are followed without it, and this call if nothing
        of it has run yet. A module that is not marked is traced.
        """
        self._follow_again(graph)
        name = getattr(error, "module", None)
        module = self.outside.left_out(name, error) if name else None
        if module is None or module in self._follower.left_out():
            super()._leave_out(graph, error)
            return
        self._follower.leave_out(module)
        self._compiled.start_over()
        if not self._has_run and len(self.outside.reasons()) == 1:
            raise _RestartCall from None
