"""One fitted callable: its plans, its open steps, its guard."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from tightfit.capture.probe import probe
from tightfit.capture.side_effects.generators import GeneratorStates
from tightfit.errors import CaptureError, Diverged, OpaqueChanged
from tightfit.progress import announce
from tightfit.session.whole.learning import watch

if TYPE_CHECKING:
    from tightfit.session.whole.specialisation import Shape


import weakref
from collections.abc import Callable, Iterable

import torch
from torch import nn

from tightfit.capture.calls.signature import call_signature, flatten, refuse_transforms
from tightfit.capture.captured import Captured, outputs_beside_the_loss, placeholder_tensors
from tightfit.capture.side_effects.attributes import KeptTensors, Place, forget, put
from tightfit.capture.traced_call import TracedCall
from tightfit.errors import BadInput, SecondForward
from tightfit.execution.guard import Guard, StepPeaks
from tightfit.execution.runtime import Run
from tightfit.graph.ir import Graph
from tightfit.plan.plan import Gradients
from tightfit.planners.questions.minimum import MinimumBudget
from tightfit.session.memory.budget import (
    Budget,
    close_windows,
    limit_bytes,
    usable_bytes,
)
from tightfit.session.memory.surroundings import assumed_outside_bytes
from tightfit.session.options import Options, with_ranks, worst_first
from tightfit.session.parts.in_parts import Fallback, refuse_to_prepare, run_in_parts
from tightfit.session.processes import Replicas, running_wrapper
from tightfit.session.report import Report, report_of
from tightfit.session.stages import capture_step_around_data
from tightfit.session.whole.captures import forget_oldest, most_alike, warn_of_hooks
from tightfit.session.whole.planning import (
    declare_needs,
    planned_for,
    recall_costs,
    smallest_budget,
)
from tightfit.session.whole.specialisation import Planned, Shape
from tightfit.torch_private import tools as tools

__all__ = ["Session", "run_as_data_decide"]


class Session:
    """Runs a callable as planned steps.

    Parameters
    ----------
    function : callable
        What is run: the module's own forward, or the function given to `step`.
    modules : dict of str to nn.Module
        The modules whose parameters it uses.
    root : nn.Module or None
        The module fitted in place; its own hooks run around the step.
    options : Options
        What the user asked for.
    name : str
        For messages and graphs.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        modules: dict[str, nn.Module],
        root: nn.Module | None,
        options: Options,
        name: str,
    ) -> None:
        self.function = function
        self.modules = modules
        self.root = weakref.ref(root) if root is not None else None
        self.options = options
        self.name = name
        if options.shared is not None:
            options.shared.join(self)
        self.shapes: dict[Any, list[Shape]] = {}  # by signature; several if inputs decide
        self.detached: dict[Any, frozenset[int]] = {}
        self.opaque: frozenset[str] = frozenset()
        self.answered: frozenset[str] = frozenset()
        self.kept: frozenset[Place] = frozenset()
        self.changing: frozenset[tuple[str, str]] = frozenset()  # attributes, by opaque modules
        self.open: weakref.WeakSet[Run] = weakref.WeakSet()
        self.guard: Guard | None = None
        self.calls = 0
        self.last: Planned | None = None
        self.state_bytes: int | None = None
        self.seen_state_bytes: int | None = None
        self.reported = False
        self.warned_hooks: set[str] = set()
        self.replicas: Replicas | None = None
        self.parts: Fallback | None = None
        self._at_leaving: list[Callable[[], None]] = []

    # -- calling ------------------------------------------------------------------------------

    @property
    def is_used(self) -> bool:
        """Whether a planned call has been run, or is to be."""
        return self.calls > 0 or self.parts is not None

    @property
    def waiting(self) -> list[Run]:
        """Planned calls that await their backward."""
        return [run for run in self.open if run.is_open]

    def is_of(self, module: nn.Module) -> bool:
        """Whether this session was made for the module (and not for one it was copied from)."""
        return self.root is not None and self.root() is module

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one planned forward; the plain callable if no backward can come."""
        leaves, spec = flatten(args, kwargs)
        trains = torch.is_grad_enabled() and self.needs_gradient(leaves)
        if not trains or tools.is_exported():
            return self.function(*args, **kwargs)
        refuse_transforms(self.name)
        self._refuse_second_forward()
        self.join_replicas(running_wrapper())
        if self.parts is not None:
            return self.parts(args, kwargs)
        forget(self.modules, self.kept)
        try:
            shape = self.shape_for(self._signature(leaves, spec), args, kwargs)
            watch(self, shape)
            shape, outputs = run_as_data_decide(self, shape, leaves, args, kwargs)
        except CaptureError as error:
            return run_in_parts(self, error, args, kwargs)
        if self.guard is not None:
            self.guard.after_forward()
        return put(shape.captured.joint.structure.filled(outputs), self.modules)

    def run(self, shape: Shape, leaves: list[Any]) -> list[Any]:
        """Run the forward of a shape's plan; return its flattened outputs."""
        inputs = placeholder_tensors(shape.captured.joint, self.modules, leaves)
        planned = planned_for(self, shape, self._gradients(shape.captured, inputs), inputs)
        self.last = planned
        run = Run(self._backward_started(shape), self._backward_finished(shape))
        self.open.add(run)
        self.calls += 1
        if shape.tuner is not None:
            shape.tuner.begin_step()
        return planned.runner(inputs, run)

    def prepare(self, leaves: list[Any], spec: Any, args: Any, kwargs: Any) -> Report:
        """Capture, price and plan for the given inputs without running anything."""
        if self.parts is not None:
            return self.report()
        try:
            shape = self.shape_for(self._signature(leaves, spec), args, kwargs)
        except CaptureError as error:
            refuse_to_prepare(self, error)
        inputs = placeholder_tensors(shape.captured.joint, self.modules, leaves)
        self.last = planned_for(self, shape, self._gradients(shape.captured, inputs), inputs)
        return self.report()

    def prepare_all(self, shapes: Iterable[Any]) -> None:
        """Plan for example inputs, the largest first: what does not fit shows at once."""
        for args, kwargs in worst_first(shapes, self.modules):
            leaves, spec = flatten(args, kwargs)
            with torch.enable_grad():
                self.prepare(leaves, spec, args, kwargs)

    def report(self) -> Report:
        """Return what the current plan promises and what the last step held.

        Raises
        ------
        BadInput
            If nothing has been planned yet.
        """
        if self.parts is not None:
            return self.parts.report()
        if self.last is None:
            raise BadInput(
                "nothing is planned yet: call the model once, or tightfit.prepare(model, *inputs)"
            )
        steps = self.guard.steps if self.guard is not None else []
        graph = self.last.graph
        return report_of(
            self.last.outcome,
            graph.constant_bytes,
            self.budget_bytes(),
            graph.cost_source,
            steps[-1] if steps else None,
            self.last.compiled_peak_bytes,
        )

    def join_replicas(self, wrapper: Any) -> None:
        """Plan together with the ranks of the DistributedDataParallel around, if there is one."""
        if wrapper is None or (self.replicas is not None and self.replicas.is_of(wrapper)):
            return
        self.close_step()
        self.replicas = Replicas(wrapper)
        self.options = with_ranks(self.options, self.replicas.ranks)
        for shape in self.all_shapes():
            shape.forget_plans()
        self.shapes.clear()  # what was found out alone is found out together
        self.guard = self.parts = None

    def needs_gradient(self, leaves: list[Any]) -> bool:
        if any(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves):
            return True
        return any(p.requires_grad for m in self.modules.values() for p in m.parameters())

    def _refuse_second_forward(self) -> None:
        waiting = len(self.waiting)
        if waiting >= self.options.in_flight:
            raise SecondForward(
                f"{self.name} was called again while {waiting} earlier planned call(s) await "
                "their backward: each would keep its activations and the budget would not hold. "
                "Call backward first, put all into one function for tightfit.step, or allow it by "
                f"in_flight={waiting + 1} (each call gets its share of the budget). If no "
                "backward is to come: torch.no_grad(), or let go of the outputs (del loss)"
            )

    def _signature(self, leaves: list[Any], spec: Any) -> Any:
        root = self.root() if self.root is not None else None
        kept = self.changing.union(place[:2] for place in self.kept)
        return call_signature(leaves, spec, self.modules, root, kept)

    @property
    def is_tuning(self) -> bool:
        """Whether steps are still timed before the final plan is made."""
        return any(shape.tuner is not None for shape in self.all_shapes())

    def all_shapes(self) -> list[Shape]:
        """Return what was made for every signature and decision so far."""
        return [shape for alike in self.shapes.values() for shape in alike]

    def change_budget(self, budget_bytes: int) -> None:
        """Plan the next step within another budget; what was captured and priced stays."""
        self.close_step()
        self.options = dataclasses.replace(self.options, budget_bytes=budget_bytes)
        if self.parts is not None:
            self.parts.steps.change_budget(self.options)
        else:
            self.guard = None

    def close_step(self) -> StepPeaks | None:
        """End the measured window of the last step now; return what it held."""
        if self.parts is not None:
            return self.parts.close_step()
        return self.guard.close() if self.guard is not None else None

    def at_leaving(self, callback: Callable[[], None]) -> None:
        """Call back when the model is fitted no longer, or anew."""
        self._at_leaving.append(callback)

    def leave(self) -> None:
        """No longer take part in a shared budget; take back what watches the model."""
        if self.options.shared is not None:
            self.options.shared.leave(self)
        for callback in self._at_leaving:
            callback()
        self._at_leaving.clear()

    # -- capture ------------------------------------------------------------------------------

    def shape_for(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shape:
        """Return what was made for this signature; capture it the first time."""
        shape = self._known_shape(key, flatten(args, kwargs)[0])
        if shape is None:
            if self.shapes:
                announce(f"{self.name} is called with new inputs or flags: making a new plan")
            shape = self.new_shape(key, self.traced_call(key, args, kwargs))
        shape.used = self.calls
        return shape

    def new_shape(self, key: Any, call: TracedCall) -> Shape:
        """Capture a call."""
        close_windows(self)  # what capture and measurements take belongs to no step
        neighbour = self._neighbour(key)
        call = dataclasses.replace(call, detached_outputs=self.detached.get(key, frozenset()))
        captured = self._capture(key, call, neighbour)
        leaves, spec = flatten(call.args, call.kwargs)
        settled = self._signature(leaves, spec)  # what a first run sets up has changed it
        self.detached[settled] = self.detached.get(key, frozenset())
        shape = Shape(settled, captured, is_further=neighbour is not None)
        timed = self.options.costs == "measured" and not self.options.compile
        if timed and shape.captured.graph.device.kind == "cpu":
            recall_costs(self, shape)
        shape.outside_bytes = assumed_outside_bytes(shape.captured)
        self.shapes.setdefault(shape.key, []).append(shape)
        shape.used = self.calls
        forget_oldest(self.shapes)
        return shape

    def _known_shape(self, key: Any, leaves: list[Any]) -> Shape | None:
        """Return what was captured for this signature, where inputs decide the same again."""
        for shape in sorted(self.shapes.get(key, ()), key=lambda shape: -shape.used):
            joint = shape.captured.joint
            if joint.decisions.hold(leaves, {**self.modules, **joint.outside}):
                return shape
        return None

    def _neighbour(self, key: Any) -> Graph | None:
        """Return the graph of the same call on other sizes or answers, its own costs preferred."""
        known = most_alike(self.shapes, key)
        if known is None:
            return None
        self.detached.setdefault(key, self.detached.get(known, frozenset()))
        return max(self.shapes[known], key=lambda shape: shape.used).captured.graph

    def traced_call(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TracedCall:
        """Return what is to be captured, with what is known of it by now."""
        detached = self.detached.get(key, frozenset())
        return TracedCall(
            self.function,
            self.modules,
            args,
            kwargs,
            detached_outputs=detached,
            opaque=self.opaque,
            answered=self.answered,
        )

    def _capture(self, key: Any, call: TracedCall, neighbour: Graph | None) -> Captured:
        warn_of_hooks(self.modules, self.root() if self.root else None, self.warned_hooks)
        captured, call = self._captured(call, neighbour)
        others = outputs_beside_the_loss(captured) - call.detached_outputs
        if others:
            self.detached[key] = call.detached_outputs | others
            call = dataclasses.replace(call, detached_outputs=self.detached[key])
            captured, call = self._captured(call, neighbour)
        self.opaque, self.answered = call.opaque, call.answered
        self.changing |= captured.joint.opaque.changing
        if isinstance(call.function, KeptTensors):
            self.kept |= call.function.places
        return captured

    def _captured(self, call: TracedCall, neighbour: Graph | None) -> tuple[Captured, TracedCall]:
        return capture_step_around_data(call, self.options, self.name, neighbour, keeping=True)

    # -- planning -----------------------------------------------------------------------------

    def budget_bytes(self) -> int:
        """Return the bytes a plan may use: the budget, or what is free now, minus the reserve."""
        return usable_bytes(limit_bytes(self), self.options.reserve_bytes)

    def smallest_budget(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MinimumBudget:
        """Find the smallest budget with a plan for these inputs; the plan is kept in mind."""
        return smallest_budget(self, *self._shape_and_gradients(args, kwargs))

    def declare_needs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], budget: Budget
    ) -> MinimumBudget:
        """Tell a budget that is to be shared what these inputs need; return the least."""
        return declare_needs(self, *self._shape_and_gradients(args, kwargs), budget)

    def _shape_and_gradients(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Shape, Gradients]:
        leaves, spec = flatten(args, kwargs)
        shape = self.shape_for(self._signature(leaves, spec), args, kwargs)
        inputs = placeholder_tensors(shape.captured.joint, self.modules, leaves)
        return shape, self._gradients(shape.captured, inputs)

    def _gradients(self, captured: Captured, inputs: list[Any]) -> Gradients:
        """Return whether gradients outlive their hand-over, or go into what exists before."""
        owners = [inputs[position] for _, position in captured.joint.gradients]
        missing = [o for o in owners if not o.is_leaf or o.grad is None]
        taken = self.replicas is not None and self.replicas.takes(missing)
        return "fresh" if missing and not taken else "accumulated"

    # -- backward -----------------------------------------------------------------------------

    def _backward_started(self, shape: Shape) -> Callable[[Run], None]:
        def started(run: Run) -> None:
            if shape.tuner is not None:
                shape.tuner.begin()
            if self.guard is not None:
                self.guard.before_backward()
            if run.state != "refused" and not run.unused:
                return
            before = self.detached.get(shape.key, frozenset())
            self.detached[shape.key] = run.detached_after(before)
            self.shapes.pop(shape.key, None)
            if run.state != "refused":
                unused = sorted(run.unused)
                announce(f"output(s) {unused} receive no gradient: planning without them")

        return started

    def _backward_finished(self, shape: Shape) -> Callable[[Run], None]:
        def finished(run: Run) -> None:
            if self.guard is not None and run.state == "failed":
                self.guard.abandon()
            elif self.guard is not None:
                self.guard.after_backward()

        return finished


_MOST_ATTEMPTS = 8


def run_as_data_decide(
    session: Session, shape: Shape, leaves: list[Any], args: Any, kwargs: Any
) -> tuple[Shape, list[Any]]:
    """Run a forward; where its data ask for another plan than expected, run that one.

    A forward that ends early has changed nothing: buffers are written at its end, and generators
    are put back.

    Returns
    -------
    shape : Shape
        What was run in the end.
    outputs : list
        Its flattened outputs.
    """
    for _ in range(_MOST_ATTEMPTS):
        joint = shape.captured.joint
        if not joint.questions and not joint.opaque.calls:
            return shape, session.run(shape, leaves)
        before = GeneratorStates(session.modules)
        try:
            return shape, session.run(shape, leaves)
        except (OpaqueChanged, Diverged) as change:
            if joint.opaque.changes_state:  # a module writes its buffers when it runs
                raise
            more = str(change) if isinstance(change, OpaqueChanged) else None
        before.restore()
        if more is not None:
            session.shapes.pop(shape.key, None)
            announce(more)
            shape = session.shape_for(shape.key, args, kwargs)
        else:
            shape = _shape_answering(session, shape, args, kwargs)
    raise CaptureError(
        f"what {session.name} runs is decided otherwise each time it is run with the same inputs: "
        "that cannot be planned. Way out: move what decides out of the fitted module"
    )


def _shape_answering(session: Session, unfit: Shape, args: Any, kwargs: Any) -> Shape:
    """Return what was captured for what data decide now; capture it the first time."""
    call = session.traced_call(unfit.key, args, kwargs)
    found = probe(call)
    for shape in session.shapes.get(unfit.key, ()):
        if shape is not unfit and shape.captured.joint.answers == found.answers:
            shape.used = session.calls
            return shape
    announce(f"{session.name} computes values that decide otherwise: making a new plan")
    call = dataclasses.replace(call, answers=found.answers, examples=found.examples)
    shape = session.new_shape(unfit.key, call)
    watch(session, shape)
    return shape
