"""Runs a callee through Dynamo: each graph that is handed over is a planned step."""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from tightfit.capture.calls.structure import Arguments
from tightfit.capture.handed import HandedGraph, HandedGraphs, is_handed
from tightfit.dynamo.backend import GraphCall, HandOver
from tightfit.dynamo.compiled import Compiled, Following
from tightfit.dynamo.kept import Kept
from tightfit.dynamo.outside import Outside
from tightfit.errors import BadInput, CaptureError, NothingToTrain
from tightfit.planners.questions.minimum import MinimumBudget
from tightfit.session.anywhere import Anywhere
from tightfit.session.callee import Callee
from tightfit.session.memory.account import Account
from tightfit.session.options import Options
from tightfit.session.report import Report
from tightfit.session.whole.steps import WholeSteps
from tightfit.torch_private import dynamo as private

__all__ = ["GraphSteps", "steps_of"]


class _Asked(BaseException):
    """Ends a call that was only to hand over its graph; it holds what was asked."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer


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
        hand_over = _handing_over_to(weakref.ref(self))
        kept = Kept(callee.modules, hand_over) if options.cache else None
        self._compiled = Compiled(callee.function, callee.name, hand_over, self._follower, kept)
        self._asks: Any = None
        self._is_called = False
        self._has_run = False

    @property
    def is_used(self) -> bool:
        """Whether it has been called: what ran outside of its plans then is known."""
        return self._is_called

    def __call__(self, given: Arguments) -> Any:
        """Run the callee; its graphs run their plans."""
        self._is_called = True
        self._has_run = False
        self.outside.watch(self.graphs.takes)
        while True:
            try:
                return self._compiled(given.args, dict(given.kwargs))
            except _Anew:
                self._compiled.start_anew()

    def _called(self, graph: HandedGraph, inputs: Sequence[Any]) -> Any:
        """Run one call of a graph; or answer what is asked of it."""
        given = Arguments.of(self.graphs.arguments(graph, inputs), {})
        if self._asks is None:
            if graph.reason:
                self.outside.broke(graph.reason)
                self._expect_others()
            return self._run_graph(given)
        if graph.reason:
            raise CaptureError(f"it is no single graph: {graph.reason}")
        raise _Asked(self._asks(given))

    def _expect_others(self) -> None:
        """Have graphs that are new run with least memory: nobody knows yet what follows them."""
        if not self.options.others_to_come:
            self.options = dataclasses.replace(self.options, others_to_come=True)

    def _run_graph(self, given: Arguments) -> Any:
        """Run a graph by its plan; begin the call anew without a module that no plan holds.

        Raises
        ------
        CaptureError
            If it names no such module. Where something of the call has run, the next one is
            without that module.
        """
        try:
            output = super().__call__(given)
        except CaptureError as error:
            module = self.outside.left_out(error.module, error) if error.module else None
            if module is None or module in self._follower.left_out():
                raise
            has_run = self._has_run or len(self.outside.reasons()) > 1
            self._follower.leave_out(module)
            if has_run:
                self._compiled.start_anew()
                raise
            raise _Anew from None
        self._has_run = True
        return output

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
        except _Asked as asked:
            return asked.answer
        finally:
            self._asks = None
        raise NothingToTrain(
            f"{self.callee.name} has no graph in which anything is trained: no output depends on a "
            "parameter that requires a gradient"
        )

    def report(self) -> Report:
        """Return what the current plan promises, what the last step held, what ran outside."""
        return msgspec.structs.replace(super().report(), outside=self.outside.reasons())

    def prepare(self, given: Arguments, *, quickly: bool = False) -> None:
        """Capture, price and plan for the given inputs without running anything."""
        prepare = super().prepare
        self._asked(given, lambda graph: prepare(graph, quickly=quickly))

    def smallest_budget(self, given: Arguments) -> MinimumBudget:
        """Find the smallest budget with a plan for these inputs; the plan is kept in mind."""
        return self._asked(given, super().smallest_budget)


def _handing_over_to(steps: weakref.ref[GraphSteps]) -> HandOver:
    """Return what takes graphs for steps; Dynamo keeps it, which must not keep the model alive."""

    def hand_over(graph: HandedGraph) -> GraphCall:
        def call(inputs: Sequence[Any]) -> Any:
            found = steps()
            return graph.module(*inputs) if found is None else found._called(graph, inputs)

        return call

    return hand_over


def steps_of(callee: Callee, options: Options, account: Account, addresses: Anywhere) -> WholeSteps:
    """Return what runs a callee as planned steps; the environment says what follows its Python.

    Raises
    ------
    BadInput
        If it says neither that the tracer does nor that Dynamo does, or this PyTorch is too old.
    """
    front = os.environ.get(_VARIABLE, "python")
    if front not in _FRONTS:
        raise BadInput(f"{_VARIABLE} is {front!r}; it may be {' or '.join(_FRONTS)}")
    through_dynamo = front == "dynamo" and not is_handed(callee.function)
    if through_dynamo and not private.follows_in_place():
        raise BadInput(
            f"{_VARIABLE}=dynamo needs PyTorch 2.13, here is {torch.__version__}: leave it out"
        )
    kind = GraphSteps if through_dynamo else WholeSteps
    return kind(callee, options, account, addresses)


_VARIABLE = "TIGHTFIT_FRONT"
_FRONTS = ("python", "dynamo")
