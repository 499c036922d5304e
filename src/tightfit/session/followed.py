"""A callable whose Python Dynamo follows: calls of its graphs are handed to what runs them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tightfit.capture.calls.structure import Arguments
from tightfit.capture.handed import HandedGraph, HandedGraphs
from tightfit.dynamo.asked import Asked, refuse_break, without_graph
from tightfit.dynamo.backend import handing_over_to
from tightfit.dynamo.compiled import Compiled, Following
from tightfit.dynamo.kept import Kept
from tightfit.dynamo.outside import Outside
from tightfit.errors import CaptureError, NothingToTrain, OpaqueVaries
from tightfit.session.callee import Callee
from tightfit.session.memory.account import Account
from tightfit.torch_private.saving import saving_hook
from tightfit.torch_private.tools import running_mode, running_transform

__all__ = ["FollowedCalls", "RunsGraphs", "around_call"]


class RunsGraphs(Protocol):
    """Runs calls of graphs by plans."""

    def run_graph(self, graph: HandedGraph, inputs: Sequence[Any]) -> Any:
        """Run one call of a graph.

        Raises
        ------
        CaptureError, OpaqueVaries
            If there is no plan for it; nothing has changed then.
        """
        ...


class _Anew(BaseException):
    """Ends a call of which nothing has run yet: it begins anew with other graphs."""


class FollowedCalls:
    """Calls of a callable, whose graphs somebody runs by plans.

    Parameters
    ----------
    callee : Callee
        What is called.
    account : Account
        Has the limit within which it runs.
    keeps : bool
        Whether what Dynamo finds is kept for other processes.

    Attributes
    ----------
    graphs : HandedGraphs
        Those that have been called.
    outside : Outside
        What ran as plain Python.
    """

    def __init__(self, callee: Callee, account: Account, *, keeps: bool) -> None:
        self.name = callee.name
        self._modules = callee.modules
        self.graphs = HandedGraphs(callee.modules)
        self.outside = Outside(callee.name, callee.modules)
        self._follower = Following(callee.modules, self.outside, account)
        hand_over = handing_over_to(weakref.WeakMethod(self._called))
        kept = Kept(callee.modules, hand_over) if keeps else None
        self._compiled = Compiled(callee.function, callee.name, hand_over, self._follower, kept)
        self._runs: Callable[[], RunsGraphs | None] = lambda: None
        self._asks: Callable[[HandedGraph, Sequence[Any]], Any] | None = None
        self._has_run = False
        self._unplanned: weakref.WeakSet[HandedGraph] = weakref.WeakSet()

    def call(self, given: Arguments, runs: weakref.ref[RunsGraphs]) -> Any:
        """Run the callable; its graphs run their plans."""
        self._runs = runs
        self._has_run = False
        self.outside.watch(self.graphs.takes)
        while True:
            try:
                return self._compiled(given.args, dict(given.kwargs))
            except _Anew:
                continue

    def is_outside_of_plans(self) -> bool:
        """Whether what is around a call asks that it runs as it is; then that is noted."""
        around = around_call()
        if around is not None:
            self.outside.called_within(*around)
        return around is not None

    def asked(self, given: Arguments, asks: Callable[[Arguments], Any]) -> Any:
        """Ask something of the one graph of a call, without running it.

        Raises
        ------
        CaptureError
            If the call is no single graph.
        """

        def ask(graph: HandedGraph, inputs: Sequence[Any]) -> Any:
            refuse_break(graph)
            return asks(self.graphs.arguments(graph, inputs))

        self._asks = ask
        try:
            self._compiled(given.args, dict(given.kwargs))
        except Asked as asked:
            return asked.answer
        finally:
            self._asks = None
        raise without_graph(self.name, self._modules)

    def _called(self, graph: HandedGraph, inputs: Sequence[Any]) -> Any:
        """Run one call of a graph; or answer what is asked of it."""
        if self._asks is not None:
            raise Asked(self._asks(graph, inputs))
        runs = self._runs() if graph not in self._unplanned else None
        if runs is None:
            return graph.module(*inputs)
        try:
            output = runs.run_graph(graph, inputs)
        except NothingToTrain:
            raise
        except (CaptureError, OpaqueVaries) as error:
            self._leave_out(graph, error)
            output = graph.module(*inputs)
        self._has_run = True
        return output

    def _leave_out(self, graph: HandedGraph, error: Exception) -> None:
        """Do without a plan of a graph.

        Where a module is the cause, calls are followed without it: this one, if nothing of it has
        run yet, else those that come.
        """
        name = getattr(error, "module", None)
        module = self.outside.left_out(name, error) if name else None
        if module is None or module in self._follower.left_out():
            self.outside.left_alone(error)
            self._unplanned.add(graph)
            return
        self._follower.leave_out(module)
        self._compiled.start_anew()
        if not self._has_run and len(self.outside.reasons()) == 1:
            raise _Anew from None


def around_call() -> tuple[str, str] | None:
    """Return what is around a call that no plan can follow, and why."""
    transform, mode, hook = running_transform(), running_mode(), saving_hook()
    if transform:
        return transform, "a plan has only the one backward"
    if mode:
        return f"the mode {mode}", "it may run other operators than those of a plan"
    if hook:
        return f"hooks of saved tensors ({hook})", "they decide what is kept, not a plan"
    return None
