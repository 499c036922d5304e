"""The captured steps of a fitted callable, by signature and by the values that decide them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tightfit.capture.calls.signature import differ_in_sizes_only
from tightfit.capture.captured import Captured, StepGuards, placeholder_tensors
from tightfit.capture.graph_calls import GraphCalls, places_among
from tightfit.capture.handed import GraphArguments, HandedGraphs, takes_numbers
from tightfit.capture.traced_call import TracedCall
from tightfit.execution.runtime import Run
from tightfit.graph.ir import Graph
from tightfit.plan.plan import Plan
from tightfit.progress import announce
from tightfit.session.callee import Callee
from tightfit.session.checkpoints import announce_checkpoints
from tightfit.session.options import Options
from tightfit.session.outputs import OTHER_STRIDES, OutputGradients
from tightfit.session.stages import Pricing, capture_step
from tightfit.session.step.repeated import RepeatedCalls
from tightfit.session.whole.postponed import may_postpone
from tightfit.session.whole.specialisation import Specialisation

_MOST_KEPT = 16
_MANY_MISSES = 6  # in a row

Detached = frozenset[int]


class Captures(RepeatedCalls):
    """The captured steps of a callee, and results that later captures use."""

    def __init__(self, callee: Callee) -> None:
        super().__init__()
        self.callee = callee
        self._by_signature: dict[Any, list[Specialisation]] = {}  # several if values decide
        # The last found, if no other has its signature, which takes long to hash
        self._recent: Specialisation | None = None
        self._detached: dict[Any, Detached] = {}
        self._output_gradients = OutputGradients()
        self._takes_more = False  # whether outputs other than a loss had gradients
        assert isinstance(callee.function, HandedGraphs)
        self._graphs = GraphCalls(callee.function)
        self._deciding: set[Any] = set()  # signatures of calls of which no number can be an input
        self._other_strides: set[Any] = set()  # signatures of calls whose gradients come so
        self._misses: Counter[Any] = Counter()  # calls in a row with other numbers

    def __iter__(self) -> Iterator[Specialisation]:
        return (spec for alike in self._by_signature.values() for spec in alike)

    def __len__(self) -> int:
        """Return the number of signatures that steps were captured for."""
        return len(self._by_signature)

    def signature(self, given: GraphArguments) -> Any:
        """Return the signature of a step: inputs, modules, modes."""
        return self._graphs.signature(given)

    def inputs(self, spec: Specialisation, given: GraphArguments) -> list[Any]:
        """Return the tensors of the placeholders of a call."""
        if spec.places:
            inputs = given.inputs
            return [inputs[i] for i in spec.places]
        found = placeholder_tensors(spec.captured.joint, self.callee.modules, given.leaves)
        if spec.places is None:
            spec.note_places(places_among(given.inputs, found))
        return found

    def find(self, key: Any, given: GraphArguments) -> Specialisation | None:
        """Return the captured step of a signature whose guards hold for a call."""
        recent = self._recent
        if recent is not None and recent.key == key:
            alike = [recent]
        else:
            alike = self._by_signature.get(key, [])
            if len(alike) > 1:
                alike = sorted(alike, key=lambda spec: -spec.used)
        for found in alike:
            if self._holds(found, given):
                if self._misses:
                    self._misses.pop(key, None)
                self._recent = found if len(alike) == 1 else None
                return found
        return None

    def serves(self, spec: Specialisation, given: GraphArguments) -> bool:
        is_alike = self.signature(given) == spec.key and self._holds(spec, given)
        return is_alike and self._graphs.is_as_it_was(given, spec.key)

    def _holds(self, spec: Specialisation, given: GraphArguments) -> bool:
        """Whether values that a step has read in addition to its signature are unchanged."""
        modules = self.callee.modules
        is_alike = spec.guards.hold(given.leaves, modules, lambda: self.inputs(spec, given))
        return is_alike and self._fulfils(spec, given)

    def _fulfils(self, spec: Specialisation, given: GraphArguments) -> bool:
        """Whether parameters meet the conditions of the alternatives of a step."""
        return not spec.captured.conditions or _fulfils(spec.captured, self.inputs(spec, given))

    def other_plans(self) -> list[Plan]:
        """Return the plans known for any signature."""
        return [plan for spec in self for plan in spec.known.all()]

    def changed(self, key: Any, given: GraphArguments) -> str | None:
        """Return which values that a forward reads have changed since its last capture, as text."""
        alike = sorted(self._by_signature.get(key, ()), key=lambda spec: -spec.used)
        if alike and not self._fulfils(alike[0], given):
            return "weights of a norm have come near zero, whose gradients were made of its output"
        if not alike and (guards := self._graphs.failed_guards(given)):
            return f"guards failed ({guards})"
        return None

    def note_miss(self, key: Any, given: GraphArguments) -> bool:
        """Note that no step serves a call; return whether its numbers change in every call."""
        last = max(self._by_signature.get(key, ()), key=lambda spec: spec.used, default=None)
        if last is None:
            return False
        joint = last.captured.joint
        if joint.decisions.hold(given.leaves, self.callee.modules):
            return False  # something else has changed
        self._misses[key] += 1
        return self._misses[key] >= _MANY_MISSES

    # -- capturing ----------------------------------------------------------------------------

    def traced_call(self, key: Any, given: GraphArguments, *, compiled: bool = False) -> TracedCall:
        """Return the call to capture.

        Where it was captured before, numbers that it reads have changed: they become inputs if they
        can. A compiled step takes tensors only.
        """
        numbers = not compiled and key not in self._deciding
        if key not in self._by_signature:
            numbers = numbers and takes_numbers(self.callee.function, given.args)
        return TracedCall(
            self.callee.function,
            self.callee.modules,
            given.args,
            given.kwargs,
            detached_outputs=self._detached.get(key, frozenset()),
            loss_alone=not self._takes_more,
            numbers=numbers,
            other_strides=key in self._other_strides,
        )

    def capture(
        self, key: Any, call: TracedCall, options: Options, now: int, room_bytes: int | None = None
    ) -> Specialisation:
        """Capture a call, whose number is `now`; free the step that was not used for longest.

        `room_bytes`: memory for measuring costs while a step waits for it; None: no step waits.
        """
        neighbour = self._neighbour(key)
        call = dataclasses.replace(
            call,
            detached_outputs=self._detached.get(key, frozenset()),
            other_strides=key in self._other_strides,
        )
        postpones = neighbour is None and may_postpone(options)
        pricing = Pricing(
            neighbour,
            is_checked=options.ranks is None,
            room_bytes=room_bytes,
            postpones=postpones,
        )
        captured = capture_step(call, options, self.callee.name, pricing)
        self._detached[key] = captured.joint.detached
        announce_checkpoints(self.callee, captured.joint, (spec.captured.joint for spec in self))
        if call.numbers and not captured.joint.takes_numbers:
            self._deciding.add(key)
        leaves = call.leaves
        guards = StepGuards(captured.joint, leaves, self.callee.modules)
        made = Specialisation(key, captured, guards, is_further=neighbour is not None)
        timed = options.costs == "measured" and not options.compile
        if timed and captured.graph.device.kind == "cpu":
            made.recall_costs(options)
        made.recall_plans(options)
        made.use(now)
        self._by_signature.setdefault(key, []).append(made)
        self._recent = None
        self._forget_oldest()
        return made

    def _forget_oldest(self) -> None:
        while len(every := list(self)) > _MOST_KEPT:
            oldest = min(every, key=lambda spec: spec.used)
            oldest.forget_plans()
            for key, alike in list(self._by_signature.items()):
                self._by_signature[key] = [spec for spec in alike if spec is not oldest]
                if not self._by_signature[key]:
                    del self._by_signature[key]

    def _neighbour(self, key: Any) -> Graph | None:
        """Return the graph of the same call at other sizes or numbers, if any."""
        alike = [
            (not spec.is_further, spec.used, other)
            for other, specialisations in self._by_signature.items()
            for spec in specialisations
            if other == key or differ_in_sizes_only(other, key)
        ]
        if not alike:
            return None
        known = max(alike, key=lambda spec: spec[:2])[2]
        self._detached.setdefault(key, self._detached.get(known, frozenset()))
        if known in self._other_strides:
            self._other_strides.add(key)
        return max(self._by_signature[known], key=lambda spec: spec.used).captured.graph

    # -- freeing -------------------------------------------------------------------------------

    def forget(self, spec: Specialisation) -> None:
        """Drop the captured step of a signature."""
        self._by_signature.pop(spec.key, None)
        self._recent = None

    def forget_all(self) -> None:
        """Drop all captured steps, not the results that later captures use."""
        for spec in self:
            spec.forget_plans()
        self._by_signature.clear()
        self._recent = None

    def learn_outputs(self, spec: Specialisation, run: Run) -> None:
        """Note which outputs have received gradients; drop a step that was captured for others."""
        if spec.received is None:  # the key of a large model takes a while to hash
            self.note_backward(spec.key)
        if run.reached.in_other_strides:
            self._other_strides.add(spec.key)
            self.forget(spec)
            announce(
                f"{self.callee.name}: {OTHER_STRIDES}; planned again, without alternatives for "
                "operators that read them"
            )
            return
        used, unused = run.reached.used, run.reached.unused
        if not unused and spec.received == used:
            return  # as in the step before
        spec.note_received(used)
        self._takes_more |= bool(run.reached.unplanned)
        before = self._detached.get(spec.key, frozenset())
        self._output_gradients.note(spec.key, run.reached)
        unused = self._output_gradients.end_step(spec.key, spec.captured)
        self._detached[spec.key] = (before | unused) - used
        if self._detached[spec.key] == before:
            return
        self.forget(spec)
        if unused:
            announce(f"output(s) {sorted(unused)} receive no gradient: planning without them")


def _fulfils(captured: Captured, inputs: list[Any]) -> bool:
    joint = captured.joint
    pairs = zip(joint.placeholders, joint.sources, strict=True)
    placeholders = [node for node, source in pairs if source.kind != "tangent"]
    tensors = dict(zip(placeholders, inputs, strict=True))
    return all(condition.holds(tensors) for condition in captured.conditions)
