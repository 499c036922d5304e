"""A callable of several graphs: each graph that Dynamo makes of it is a planned part of a step."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from tightfit.allocator import meter_for
from tightfit.allocator.resident import resident_tensor_bytes
from tightfit.capture.calls.signature import shape_of_call
from tightfit.capture.calls.structure import Arguments
from tightfit.capture.captured import Captured
from tightfit.capture.handed import GraphArguments, HandedGraph
from tightfit.capture.origins import module_names
from tightfit.capture.side_effects.generators import GeneratorStates, generators_of
from tightfit.capture.traced_call import TracedCall
from tightfit.dynamo.backend import RunsEagerly
from tightfit.dynamo.outside import Outside
from tightfit.errors import CaptureError, InfeasibleBudget, OpaqueChanged, OpaqueVaries
from tightfit.session.callee import Callee
from tightfit.session.handed_calls import GraphRunner, HandedCalls
from tightfit.session.memory.account import Account
from tightfit.session.memory.limit import at_most_held, name_budget
from tightfit.session.memory.steps import stepping_bytes
from tightfit.session.options import Options
from tightfit.session.parts.kinds import Part, PartCall, class_of
from tightfit.session.parts.planning import PartsSettings
from tightfit.session.parts.route import PartsRoute
from tightfit.session.parts.steps import PartSteps
from tightfit.session.report import Report
from tightfit.session.stages import Pricing, capture_step

_LEAST_PARTS = 2  # a call has more than one graph, and others hold something while one runs
_MOST_NUMBERS = 2  # other numbers with which a graph is planned, before it runs as it is


class InGraphs(PartsRoute):
    """Runs a callee, each of its graphs by a plan for whole steps.

    `callee`, `options`, `account`: the callable, the user's wishes, and memory between steps.
    `followed`: hands over the graphs of calls.
    """

    def __init__(
        self, callee: Callee, options: Options, account: Account, followed: HandedCalls
    ) -> None:
        self.callee = callee
        self._account = account
        self._followed = followed
        self._resident = _Resident(account)
        gc.collect()  # memory freed during a step would look like room
        outside = followed.outside
        steps = PartSteps(
            callee.name,
            options,
            str(account.device),
            self._resident,
            self._capture,
            PartsSettings(way_out=_way_out(outside)),
        )
        super().__init__(options, steps, outside)
        self._parts: dict[Any, Part] = {}
        self._left = outside.left
        self._numbers: Counter[HandedGraph] = Counter()
        self._classes = Counter(map(class_of, module_names(callee.modules).values()))
        self._by_call: dict[int, Part] = {}
        self._this: weakref.ref[GraphRunner] = weakref.ref(self)

    @staticmethod
    def may_run(options: Options, account: Account) -> bool:
        """Whether the user's options can be followed graph by graph."""
        is_alone = options.shared is None and not options.compile
        return is_alone and meter_for(account.device) is not None

    def begin(self, given: Arguments) -> None:
        """Begin a step with a call, unless a step is running."""
        left = self.outside.left
        if left != self._left and not self.steps.is_under_way:  # other graphs are made since
            self._left = left
            self.steps.close_step()
            self.steps.plans.forget_absent()
        self._resident.receive(given.leaves)
        self.steps.begin(shape_of_call(given.leaves, given.spec))
        self._resident.receive(())

    def __call__(self, given: Arguments) -> Any:
        """Run one forward, its graphs as planned."""
        self.begin(given)
        return self._followed.call(given, self._this)

    def run_graph(self, graph: HandedGraph, inputs: Sequence[Any]) -> Any:
        """Run one call of a graph by its plan.

        Raises `CaptureError` if there is none; nothing has changed then.
        """
        part = self._part_of(graph, inputs)
        given = part.given(graph, inputs)
        if graph.numbers and self.steps.known.known(part, given) is None:
            self._note_numbers(graph)
        try:
            call = self.steps.kind_of(part, given)
        except OpaqueChanged as error:
            raise CaptureError(str(error)) from error
        output = self._run(part, call, given)
        self.guard.after_forward()
        return output

    def unmeasured(self) -> AbstractContextManager[None]:
        return self.steps.unmeasured()

    def _note_numbers(self, graph: HandedGraph) -> None:
        """Note that a graph is called with other numbers than before.

        Raises `RunsEagerly` if they are others in every call.
        """
        self._numbers[graph] += 1
        if self._numbers[graph] > _MOST_NUMBERS:
            self.outside.varies()
            raise RunsEagerly

    def _run(
        self, part: Part, call: PartCall | InfeasibleBudget | None, given: GraphArguments
    ) -> Any:
        if not isinstance(call, PartCall) or not call.kind.captured.joint.opaque.calls:
            return self.steps.run(part, call, given)
        before = GeneratorStates(generators_of(self.callee.modules))
        try:
            return self.steps.run(part, call, given)
        except OpaqueVaries:
            before.restore()
            self.steps.abandon()
            raise

    def _part_of(self, graph: HandedGraph, inputs: Sequence[Any]) -> Part:
        """Return the part of a step that a call of a graph is.

        It is of the smallest module that holds all of the graph's parameters and buffers: so
        layers that are alike have one plan.
        """
        graphs = self._followed.graphs
        number = graphs.arguments(graph, inputs).args[-1]
        if number not in self._by_call:
            name, modules = self._smallest(graphs.modules_of(number))
            place = name, graph.place or f"graph {number}"
            if place not in self._parts:
                others = sum(name == other for other, _ in self._parts)
                own = name or self.callee.name
                own += f" (graph {others + 1})" if others else ""
                alike = max(_LEAST_PARTS, self._classes[class_of(modules.get("part"))])
                self._parts[place] = Part(own, modules, alike=alike)
            self._by_call[number] = self._parts[place]
        return self._by_call[number]

    def _smallest(self, holders: set[nn.Module]) -> tuple[str, Mapping[str, nn.Module]]:
        """Return the smallest module that holds others, by a name that all parts share."""
        names = module_names(self.callee.modules)
        paths = [name.split(".") for name, module in names.items() if module in holders]
        common = list(paths[0]) if paths else []
        for path in paths:
            while common != path[: len(common)]:
                common.pop()
        name = ".".join(common)
        if not name or name not in names:
            return "", self.callee.modules
        return name, {"part": names[name]}

    def _capture(self, call: TracedCall, name: str) -> Captured:
        room_bytes = self.options.usable_bytes - self._account.held_bytes()
        return capture_step(call, self.options, name, Pricing(room_bytes=max(0, room_bytes)))

    def prepare(self, given: Arguments) -> None:
        """Do nothing: graphs are planned while the callable takes its first step."""

    def plain_bytes(self) -> int | None:
        return self.steps.plain_bytes()

    def report(self) -> Report:
        """Return promises of the plans and bytes held by the last complete step.

        Raises `BadInput` if nothing has been planned yet.
        """
        report = super().report()
        if not report.parts and report.outside:
            raise self.outside.nothing_planned()
        return report


def _way_out(outside: Outside) -> str:
    """Return advice for a user who is short of memory."""
    reasons = "; ".join(f"{place}: {why}" for place, why in outside.reasons().items())
    return f"change the code that keeps the callable from being planned as a whole ({reasons})"


class _Resident:
    """The memory that a model holds between its steps, by its account and the inputs of the
    call."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._leaves: Sequence[Any] = ()

    def receive(self, leaves: Sequence[Any]) -> None:
        """Count these inputs from now on."""
        self._leaves = leaves

    def resident_bytes(self) -> int:
        """Return parameters, buffers, inputs, gradients, optimizer state as they are now.

        Inputs that existed before `fit` are outside of the limit.
        """
        account, leaves = self._account, self._leaves
        earlier = [leaves[place] for place in account.held_at_call(leaves).earlier_inputs]
        earlier_bytes = resident_tensor_bytes(earlier, account.granularity_bytes)
        return at_most_held(account, account.resident_bytes(leaves) - earlier_bytes)

    def coming_bytes(self) -> int:
        return self._account.coming_state_bytes()

    def stepping_bytes(self) -> int:
        return stepping_bytes(self._account)

    def gradient_bytes(self) -> int:
        return self._account.gradient_bytes()

    def rest(self) -> None:
        """End the step: its budget is for the code that follows."""
        self._account.rest()

    def name_budget(self, needed_bytes: int) -> bool:
        return name_budget(self._account, needed_bytes)
