"""Runs the graphs that Dynamo or its caller makes of a callee: as steps, or as parts of steps."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import msgspec
import torch

from tightfit.capture.calls.signature import shape_of_call
from tightfit.capture.calls.structure import Arguments
from tightfit.capture.handed import GraphArguments, HandedGraph
from tightfit.capture.opaque.needs import NoRoomToMeasure
from tightfit.dynamo.backend import RunsEagerly
from tightfit.errors import BadInput, CaptureError, InfeasibleBudget, without_frames
from tightfit.execution.guard import left_out
from tightfit.planners.bounds import leaves_much_to_plan
from tightfit.planners.questions.minimum import MinimumBudget
from tightfit.progress import announce
from tightfit.session.callee import Callee
from tightfit.session.default_addresses import DefaultAddresses
from tightfit.session.followed import FollowedCalls
from tightfit.session.handed_calls import HandedCalls
from tightfit.session.memory.account import Account
from tightfit.session.memory.double_backward import NeedsLessEagerly
from tightfit.session.memory.limit import name_budget, raising, refuses
from tightfit.session.options import Options
from tightfit.session.parts.in_graphs import InGraphs
from tightfit.session.report import Report
from tightfit.session.step.graphs_of_step import GraphsOfStep
from tightfit.session.whole.optimistic import FitsEagerly
from tightfit.session.whole.specialisation import Planned, Specialisation
from tightfit.session.whole.steps import WholeSteps
from tightfit.units import format_bytes


@dataclasses.dataclass(frozen=True)
class _EagerRun:
    """A graph that runs as plain PyTorch because no plan of it fits."""

    error: InfeasibleBudget  # raised where a request is refused
    has_backward: bool = True  # whether there is expected to be room for its backward, too


class GraphSteps(WholeSteps):
    """Runs each graph of a callee as a planned step, or as a part of a step of several graphs."""

    def __init__(
        self, callee: Callee, options: Options, account: Account, addresses: DefaultAddresses
    ) -> None:
        self._followed = _calls_of(callee, options, account)
        self.graphs = self._followed.graphs
        self.outside = self._followed.outside
        own = dataclasses.replace(callee, function=self.graphs)
        super().__init__(own, options, account, addresses)
        self._graphs_of_step = GraphsOfStep(callee.name)
        self._given: Arguments | None = None  # of the current call
        self._is_called = False
        self._has_run = False  # a graph of the current call
        self._has_several = False  # graphs in one call, as far as is known
        self.in_graphs: InGraphs | None = None
        # Graphs that no plan fits and plain PyTorch may
        self._eager: weakref.WeakKeyDictionary[HandedGraph, _EagerRun] = weakref.WeakKeyDictionary()
        self._one_ops: list[str] = []  # that were announced
        self._derived_announced = False

    @property
    def is_used(self) -> bool:
        """Whether it has been called: the report then knows code outside of plans."""
        return self._is_called

    @property
    def times_followed(self) -> int:
        """How many frames Dynamo has followed for it so far."""
        return self._followed.times_followed

    def plain_bytes(self) -> int | None:
        """Return the most bytes of plain PyTorch in a step like the last; None: unknown."""
        if self.in_graphs is not None:
            return self.in_graphs.plain_bytes()
        return self._graphs_of_step.plain_bytes()

    def needed_bytes(self) -> int:
        graphs = self.in_graphs
        return super().needed_bytes() if graphs is None else graphs.needed_bytes()

    def outside_of_plans(self) -> bool:
        is_outside = self.outside.is_called_within()
        self._is_called = self._is_called or is_outside
        return is_outside

    def __call__(self, given: Arguments) -> Any:
        self._is_called = True
        self._given = given
        self._has_run = False
        try:
            return self._followed.call(given, weakref.ref(self))
        finally:
            self._given = None

    def run_graph(self, graph: HandedGraph, inputs: Sequence[Any]) -> Any:
        """Run one call of a graph by its plan."""
        if graph.reason:
            self.outside.broke(graph.reason)
        if graph.reason or self.outside.has_outside_code or self._has_run:
            self._has_several = True
        if self._has_several:
            self._refuse_options_of_one_graph()
        if self.in_graphs is None and self._has_several:
            if InGraphs.may_run(self.options, self.account) and not self.waiting:
                self._switch_to_graphs()
            else:
                self._expect_others()
        if self.in_graphs is not None:
            return self.in_graphs.run_graph(graph, inputs)
        self._has_run = True
        eager = self._eager.pop(graph, None)
        if eager is None:
            try:
                return super().__call__(self.graphs.arguments(graph, inputs))
            except NeedsLessEagerly:
                return self._run_derived(graph, inputs)
            except (FitsEagerly, NoRoomToMeasure) as found:
                eager = self._new_eager_run(found)
        output = self._run_eagerly(graph, inputs, eager)
        self._eager[graph] = eager  # not if the error was raised: its traceback holds the inputs
        return output

    def _refuse_options_of_one_graph(self) -> None:
        if self.options.steps is not None:
            why = "update_in_backward=True steps parameters in the backward of one graph"
            way_out = "fit without update_in_backward"
        elif self.options.offload is not None:
            why, way_out = "offload= moves values of one graph", "fit without offload="
        else:
            return
        raise BadInput(
            f"{self.callee.name} runs several graphs in one call, and {why}. Way out: "
            f"tightfit.prepare says where the graph breaks; or {way_out}"
        )

    def _new_eager_run(self, found: FitsEagerly | NoRoomToMeasure) -> _EagerRun:
        """Return how a call runs without a plan; raise what was found if it may not."""
        name = self.callee.name
        if isinstance(found, FitsEagerly):
            eager = _EagerRun(found.error, found.has_backward)
            why = "no plan fits the budget, and plain PyTorch is expected to."
            if not eager.has_backward:
                why = (
                    "no plan fits the budget, and its forward by itself is expected to: nothing is "
                    "saved for a backward."
                )
        elif self.options.needs_plans or not refuses(self.account):
            raise found
        else:
            eager = _EagerRun(without_frames(found))
            why = "the budget has no room to measure a module that runs as one op."
        announce(f"{name}: {why} It runs as plain PyTorch; requests beyond the budget are refused")
        return eager

    def _run_derived(self, graph: HandedGraph, inputs: Sequence[Any]) -> Any:
        """Run a call as plain PyTorch whose backward is expected to be differentiated."""
        self.close_step()  # of the planned call before
        needed_bytes, budget_bytes = self.double_backward.needed_bytes, self.options.limit_bytes
        why = (
            f"{self.callee.name}: its backward is differentiated (create_graph), and by a plan, "
            f"whose forward runs again for that, a step takes about {format_bytes(needed_bytes)} "
            f"of a budget of {format_bytes(budget_bytes)}"
        )
        if not self._derived_announced:
            self._derived_announced = True
            announce(f"{why}. Such calls run as plain PyTorch; requests beyond it are refused")
        error = InfeasibleBudget(why, budget_bytes=budget_bytes, minimum_bytes=needed_bytes)
        return self._run_eagerly(graph, inputs, _EagerRun(error))

    def _run_eagerly(self, graph: HandedGraph, inputs: Sequence[Any], eager: _EagerRun) -> Any:
        """Run a graph that no plan fits as plain PyTorch.

        Raises its error where requests above the limit are not refused, or once any is.
        """
        error = eager.error
        if not name_budget(self.account, error.minimum_bytes or 0):
            raise error
        if eager.has_backward:
            with raising(error):
                return graph.run_as_it_is(*inputs)
        with raising(error), _nothing_saved(error):
            output = graph.run_as_it_is(*inputs)
        _refuse_backward(output, error)
        return output

    def _capture(self, key: Any, given: GraphArguments, *, waits: bool) -> Specialisation:
        """Capture a call.

        Raises `CaptureError` if graphs leave more to plan than unmarked modules as one op each.
        """
        names = self._followed.one_ops()
        try:
            spec = super()._capture(key, given, waits=waits)
        except NoRoomToMeasure as error:
            if not names:
                raise
            raise _better_in_graphs(self.callee.name, names) from error
        if names and not leaves_much_to_plan(spec.captured.graph):
            self.captures.forget(spec)
            raise _better_in_graphs(self.callee.name, names)
        if names and names != self._one_ops:
            self._one_ops = names
            listed = ", ".join(map(repr, names))
            announce(
                f"{self.callee.name}: data decide sizes inside of {listed}: each runs eagerly, as "
                "one measured op of the plan (tightfit.opaque says so beforehand)"
            )
        return spec

    def unmeasured(self) -> AbstractContextManager[None]:
        return left_out() if self.in_graphs is None else self.in_graphs.unmeasured()

    def _switch_to_graphs(self) -> None:
        """Plan whole steps of several graphs from now on, beginning with the current call."""
        assert self._given is not None
        self.in_graphs = InGraphs(self.callee, self.options, self.account, self._followed)
        self._addresses.note_parts()
        shape = shape_of_call(self._given.leaves, self._given.spec)
        self._addresses.begin_step(shape, self.in_graphs)
        self.in_graphs.begin(self._given)

    def change_options(self, options: Options) -> None:
        super().change_options(options)
        self._eager.clear()

    def capture_again(self) -> None:
        self.in_graphs = None
        self._eager.clear()
        self._has_several = False
        super().capture_again()

    def _expect_others(self) -> None:
        """Have new graphs run with least memory: the graphs after them are unknown."""
        if not self.options.others_to_come:
            self.options = dataclasses.replace(self.options, others_to_come=True)

    def _varies(self) -> None:
        """Run a graph as plain PyTorch: the numbers that decide it change in every call."""
        self.outside.varies()
        raise RunsEagerly

    def _note_forward(self, spec: Specialisation, planned: Planned, *, is_first: bool) -> None:
        """Note by which plan a graph of the step has run."""
        self._graphs_of_step.note_call(spec.captured.graph, planned, is_first=is_first)

    def report(self) -> Report:
        """Return figures of the current plan, bytes of the last step, and code outside of plans.

        Raises `BadInput` if nothing has been planned yet.
        """
        reasons = self.outside.reasons()
        if self.last is None and reasons:
            raise self.outside.nothing_planned()
        known = self._graphs_of_step.added_to(super().report())
        return msgspec.structs.replace(known, outside=reasons)

    def prepare(self, given: Arguments, *, quickly: bool = False) -> None:
        prepare = super().prepare
        self._followed.inspect(given, lambda graph: prepare(graph, quickly=quickly))

    def smallest_budget(self, given: Arguments) -> MinimumBudget:
        return self._followed.inspect(given, super().smallest_budget)


def _nothing_saved(error: InfeasibleBudget) -> AbstractContextManager[None]:
    """Return a context in which no tensors are saved; a backward that needs them raises."""

    def refuse(_: None) -> torch.Tensor:
        raise without_frames(error)

    return torch.autograd.graph.saved_tensors_hooks(lambda _: None, refuse)


def _refuse_backward(outputs: Sequence[Any], error: InfeasibleBudget) -> None:
    """Have the backward of a call raise an error as it begins."""

    def refuse(gradients: Any) -> None:
        raise without_frames(error)

    for output in outputs:
        if isinstance(output, torch.Tensor) and output.grad_fn is not None:
            output.grad_fn.register_prehook(refuse)


def _calls_of(callee: Callee, options: Options, account: Account) -> HandedCalls:
    """Return the source of graphs of a callee: Dynamo, or its caller."""
    if callee.function is HandedGraph.run_as_it_is:
        return HandedCalls(callee)
    return FollowedCalls(callee, account, keeps=options.cache)


def _better_in_graphs(name: str, modules: list[str]) -> CaptureError:
    return CaptureError(
        f"{name} is planned graph by graph: as one op each, {', '.join(modules)} would hold most "
        "of a step's saved tensors"
    )
