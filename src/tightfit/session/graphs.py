"""Runs a callee through Dynamo: each graph that is handed over is a planned step."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import msgspec

from tightfit.capture.calls.signature import refuse_transforms
from tightfit.capture.calls.structure import Arguments
from tightfit.capture.handed import HandedGraph, HandedGraphs, is_handed
from tightfit.capture.side_effects.saving import refuse_saving_hooks
from tightfit.dynamo.asked import Asked, nothing_to_train, refuse_break
from tightfit.dynamo.backend import RunsPlainly, handing_over_to
from tightfit.dynamo.compiled import Compiled, Following
from tightfit.dynamo.front import goes_through_dynamo
from tightfit.dynamo.kept import Kept
from tightfit.dynamo.outside import Outside
from tightfit.errors import BadInput, CaptureError, NothingToTrain, OpaqueVaries
from tightfit.planners.questions.minimum import MinimumBudget
from tightfit.session.anywhere import Anywhere
from tightfit.session.callee import Callee
from tightfit.session.memory.account import Account
from tightfit.session.options import Options
from tightfit.session.report import Report
from tightfit.session.step.graphs_of_step import GraphsOfStep
from tightfit.session.whole.specialisation import Specialisation
from tightfit.session.whole.steps import WholeSteps
from tightfit.torch_private.saving import saving_hook
from tightfit.torch_private.tools import running_mode, running_transform

__all__ = ["GraphSteps", "runs_outside", "steps_of"]


class _Anew(BaseException):
    """Ends a call of which nothing has run yet: it begins anew with other graphs."""


class GraphSteps(WholeSteps):
    """Runs a callee as the graphs that Dynamo makes of it, each planned as a step.

    Parameters
    ----------
    callee, options, account, addresses
        As of `WholeSteps`.
    """

    def __init__(
        self, callee: Callee, options: Options, account: Account, addresses: Anywhere
    ) -> None:
        self.graphs = HandedGraphs(callee.modules)
        own = dataclasses.replace(callee, function=self.graphs)
        super().__init__(own, options, account, addresses)
        self.outside = Outside(callee.name, callee.modules)
        self._follower = Following(callee.modules, self.outside, account)
        hand_over = handing_over_to(weakref.WeakMethod(self._called))
        kept = Kept(callee.modules, hand_over) if options.cache else None
        self._compiled = Compiled(callee.function, callee.name, hand_over, self._follower, kept)
        self._graphs_of_step = GraphsOfStep(callee.name)
        self._asks: Any = None
        self._is_called = False
        self._has_run = False
        self._unplanned: weakref.WeakSet[HandedGraph] = weakref.WeakSet()

    @property
    def is_used(self) -> bool:
        """Whether it has been called: what ran outside of its plans then is known."""
        return self._is_called

    def outside_of_plans(self) -> bool:
        """Whether what is around a call asks that it runs as it is; then that is noted."""
        around = self._around()
        if around is None:
            return False
        self.outside.called_within(*around)
        self._is_called = True
        return True

    def _around(self) -> tuple[str, str] | None:
        """Return what is around a call that no plan can follow, and why."""
        transform, mode, hook = running_transform(), running_mode(), saving_hook()
        if transform:
            return transform, "a plan has only the one backward"
        if mode:
            return f"the mode {mode}", "it may run other operators than those of a plan"
        if hook:
            return f"hooks of saved tensors ({hook})", "they decide what is kept, not a plan"
        return None

    def __call__(self, given: Arguments) -> Any:
        """Run the callee; its graphs run their plans."""
        self._is_called = True
        self._has_run = False
        self.outside.watch(self.graphs.takes)
        while True:
            try:
                return self._compiled(given.args, dict(given.kwargs))
            except _Anew:
                continue

    def _called(self, graph: HandedGraph, inputs: Sequence[Any]) -> Any:
        """Run one call of a graph; or answer what is asked of it."""
        if graph in self._unplanned and self._asks is None:
            return graph.module(*inputs)
        given = self.graphs.arguments(graph, inputs)
        if self._asks is None:
            if graph.reason:
                self.outside.broke(graph.reason)
                self._expect_others()
            return self._run_graph(graph, given, inputs)
        refuse_break(graph)
        raise Asked(self._asks(given))

    def _expect_others(self) -> None:
        """Have graphs that are new run with least memory: nobody knows yet what follows them."""
        if not self.options.others_to_come:
            self.options = dataclasses.replace(self.options, others_to_come=True)

    def _run_graph(self, graph: HandedGraph, given: Arguments, inputs: Sequence[Any]) -> Any:
        """Run a graph by its plan, or as it is if it cannot be planned.

        Where a module is the cause, calls are followed without it: this one, if nothing of it has
        run yet, else those that come.
        """
        try:
            output = super().__call__(given)
        except NothingToTrain:
            raise
        except (CaptureError, OpaqueVaries) as error:
            module = self.outside.left_out(error.module, error) if error.module else None
            if module is None or module in self._follower.left_out():
                self.outside.left_alone(error)
                self._unplanned.add(graph)
            else:
                self._follower.leave_out(module)
                self._compiled.start_anew()
                if not self._has_run and len(self.outside.reasons()) == 1:
                    raise _Anew from None
            output = graph.module(*inputs)
        self._has_run = True
        return output

    def _with_deciding_ops(self, key: Any, given: Arguments) -> None:
        """Leave a graph to plain PyTorch where numbers decide otherwise in every call.

        Raises
        ------
        RunsPlainly
            If they do.
        """
        if self.options.ranks is None and self.captures.deciding_inputs(key, given) is not None:
            self.outside.varies()
            raise RunsPlainly

    def _run(self, one: Specialisation, given: Arguments, inputs: list[Any]) -> list[Any]:
        """Run the forward of a plan; note by which one it ran."""
        is_first = not self.waiting
        outputs = super()._run(one, given, inputs)
        assert self.last is not None
        self._graphs_of_step.ran(one.captured.graph, self.last, is_first=is_first)
        return outputs

    def _asked(self, given: Arguments, asks: Any) -> Any:
        """Ask something of the one graph of a call, without running it.

        Raises
        ------
        CaptureError
            If the call is no single graph.
        """
        self._asks = asks
        try:
            self._compiled(given.args, dict(given.kwargs))
        except Asked as asked:
            return asked.answer
        finally:
            self._asks = None
        raise nothing_to_train(self.callee.name)

    def report(self) -> Report:
        """Return what the current plan promises, what the last step held, what ran outside.

        Raises
        ------
        BadInput
            If nothing has been planned yet.
        """
        reasons = self.outside.reasons()
        if self.last is None and reasons:
            told = "; ".join(f"{what}: {why}" for what, why in reasons.items())
            raise BadInput(f"nothing is planned yet; what ran outside of every plan: {told}")
        known = self._graphs_of_step.added_to(super().report())
        return msgspec.structs.replace(known, outside=reasons)

    def prepare(self, given: Arguments, *, quickly: bool = False) -> None:
        """Capture, price and plan for the given inputs without running anything."""
        prepare = super().prepare
        self._asked(given, lambda graph: prepare(graph, quickly=quickly))

    def smallest_budget(self, given: Arguments) -> MinimumBudget:
        """Find the smallest budget with a plan for these inputs; the plan is kept in mind."""
        return self._asked(given, super().smallest_budget)


def runs_outside(route: object, name: str) -> bool:
    """Whether what is around a call asks that it runs outside of every plan; then that is noted.

    Raises
    ------
    CaptureError
        If calls are refused there.
    """
    if isinstance(route, GraphSteps):
        return route.outside_of_plans()
    refuse_transforms(name)
    refuse_saving_hooks(name)
    return False


def steps_of(callee: Callee, options: Options, account: Account, addresses: Anywhere) -> WholeSteps:
    """Return what runs a callee as planned steps; the environment says what follows its Python.

    Raises
    ------
    BadInput
        If it says neither that the tracer does nor that Dynamo does, or this PyTorch is too old.
    """
    through_dynamo = not is_handed(callee.function) and goes_through_dynamo()
    kind = GraphSteps if through_dynamo else WholeSteps
    return kind(callee, options, account, addresses)
