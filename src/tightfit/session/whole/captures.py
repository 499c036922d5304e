"""What is captured of a fitted callable, by signature and by what data decided."""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tightfit.capture.calls.attributes import ReadAttributes
from tightfit.capture.calls.modules import SeenModules
from tightfit.capture.calls.signature import call_signature, differ_in_sizes_only
from tightfit.capture.calls.structure import Arguments
from tightfit.capture.captured import (
    Captured,
    placeholder_tensors,
    tensors_of,
)
from tightfit.capture.graph_calls import GraphCalls, places_among
from tightfit.capture.handed import GraphArguments, HandedGraphs, ReadsUnseen, takes_numbers
from tightfit.capture.traced_call import TracedCall
from tightfit.execution.runtime import Run
from tightfit.graph.ir import Graph
from tightfit.plan.plan import Plan
from tightfit.progress import announce
from tightfit.session.callee import Callee
from tightfit.session.checkpoints import announce_checkpoints
from tightfit.session.options import Options
from tightfit.session.outputs import Usage
from tightfit.session.stages import capture_step_around_data
from tightfit.session.whole.postponed import may_postpone
from tightfit.session.whole.specialisation import Specialisation

__all__ = ["Captures"]

_MOST_KEPT = 16
_MANY_MISSES = 6  # calls in turn

Detached = frozenset[int]


class Captures:
    """The captured steps of a callee, and what is known by now for capturing further ones.

    Parameters
    ----------
    callee : Callee
        What is captured.

    """

    def __init__(self, callee: Callee) -> None:
        self.callee = callee
        self._seen = SeenModules(callee.modules)
        self._by_signature: dict[Any, list[Specialisation]] = {}  # several if inputs decide
        self._detached: dict[Any, Detached] = {}
        self._usage = Usage()
        self._takes_more = False  # than a loss, of what a call returns
        self._shown: weakref.WeakKeyDictionary[Specialisation, frozenset[int]]
        self._shown = weakref.WeakKeyDictionary()  # which outputs had gradients the last time
        self._repeated: set[Any] = set()  # signatures of calls with several backwards
        graphs = callee.function
        handed = isinstance(graphs, HandedGraphs)
        self._graphs = GraphCalls(graphs, self._looked_at) if handed else None
        self._read = ReadsUnseen().attributes(callee.modules) if handed else None  # None: any
        self._changing: frozenset[tuple[str, str]] = frozenset()  # attributes, by opaque modules
        self._deciding: set[Any] = set()  # signatures of calls all of whose numbers decide
        self._misses: Counter[Any] = Counter()  # calls in turn whose numbers were new

    def __iter__(self) -> Iterator[Specialisation]:
        """Iterate over all that was captured so far."""
        return (one for alike in self._by_signature.values() for one in alike)

    def __len__(self) -> int:
        """Return for how many signatures steps were captured."""
        return len(self._by_signature)

    def signature(self, given: Arguments) -> Any:
        """Return what a step depends on: inputs, modules, modes."""
        return self._looked_at(given) if self._graphs is None else self._graphs.signature(given)

    def _looked_at(self, given: Arguments) -> tuple[Any, Any]:
        return call_signature(
            given.leaves, given.spec, self._seen, self.callee.root, self._changing, self._read
        )

    def inputs(self, one: Specialisation, given: Arguments) -> list[Any]:
        """Return the tensors of the placeholders of a call whose signature was asked for."""
        if not isinstance(given, GraphArguments):
            return self._inputs_by_name(one, given)
        if one.places:
            inputs = given.inputs
            return [inputs[i] for i in one.places]
        self._looked_at(given)  # where modules hold tensors now
        found = self._inputs_by_name(one, given)
        if one.places is None:
            one.note_places(places_among(given.inputs, found))
        return found

    def _inputs_by_name(self, one: Specialisation, given: Arguments) -> list[Any]:
        joint = one.captured.joint
        if joint.outside:
            return placeholder_tensors(joint, self.callee.modules, given.leaves)
        return tensors_of(joint, given.leaves, self._seen.tensor)

    def find(self, key: Any, given: Arguments) -> Specialisation | None:
        """Return what was captured for a signature, where inputs decide the same again."""
        alike = self._by_signature.get(key, ())
        if len(alike) > 1:
            alike = sorted(alike, key=lambda one: -one.used)
        for found in alike:
            if self._holds(found, given):
                self._misses.pop(key, None)
                return found
        return None

    def serves(self, one: Specialisation, given: Arguments) -> bool:
        """Whether a captured step is that of a call, as modules and inputs are now."""
        if self.signature(given) != one.key or not self._holds(one, given):
            return False
        if self._graphs is None or not isinstance(given, GraphArguments):
            return True
        return self._graphs.is_as_it_was(given, one.key)

    def _holds(self, one: Specialisation, given: Arguments) -> bool:
        """Whether what a step has read, beside its signature, is what it was."""
        joint = one.captured.joint
        if not one.captured.reads.hold():
            return False
        one.captured.reads.fetch()
        decides = joint.decisions.hold(given.leaves, {**self.callee.modules, **joint.outside})
        return decides and self._fulfils(one, given)

    def _fulfils(self, one: Specialisation, given: Arguments) -> bool:
        """Whether parameters are what the alternatives of a step ask of them."""
        return not one.captured.conditions or _fulfils(one.captured, self.inputs(one, given))

    def other_plans(self) -> list[Plan]:
        """Return the plans known for any signature."""
        return [plan for one in self for plan in one.known.all()]

    def change(self, key: Any, given: Arguments) -> str | None:
        """Say what has changed of what forward reads since a signature was last captured for."""
        alike = sorted(self._by_signature.get(key, ()), key=lambda one: -one.used)
        changes = (one.captured.reads.change() for one in alike)
        found = next((change for change in changes if change is not None), None)
        if found is None and alike and not self._fulfils(alike[0], given):
            return "weights of a norm have come near zero, whose gradients were made of its output"
        return found

    def varies(self, key: Any, given: Arguments) -> bool:
        """Note that nothing serves a call; return whether numbers are others in every call."""
        last = max(self._by_signature.get(key, ()), key=lambda one: one.used, default=None)
        if last is None:
            return False
        joint = last.captured.joint
        if joint.decisions.hold(given.leaves, {**self.callee.modules, **joint.outside}):
            return False  # something else has changed
        self._misses[key] += 1
        return self._misses[key] >= _MANY_MISSES

    # -- capturing ----------------------------------------------------------------------------

    def traced_call(self, key: Any, given: Arguments, *, compiled: bool = False) -> TracedCall:
        """Return what is to be captured, with what is known of it by now.

        Where this was captured before, numbers have changed that it reads: they may be inputs. A
        compiled step takes tensors only.
        """
        return TracedCall(
            self.callee.function,
            self.callee.modules,
            given.args,
            given.kwargs,
            detached_outputs=self._detached.get(key, frozenset()),
            loss_alone=not self._takes_more,
            numbers=not compiled and key not in self._deciding and self._may_change(key, given),
        )

    def _may_change(self, key: Any, given: Arguments) -> bool:
        """Whether numbers may change that a call reads."""
        return key in self._by_signature or takes_numbers(self.callee.function, given.args)

    def capture(
        self, key: Any, call: TracedCall, options: Options, now: int, room_bytes: int | None = None
    ) -> Specialisation:
        """Capture a call, whose number is `now`; those not used for long are let go of.

        Parameters
        ----------
        room_bytes : int, optional
            What finding out costs may hold while a step waits for it; None: nobody waits.
        """
        neighbour = self._neighbour(key)
        call = dataclasses.replace(call, detached_outputs=self._detached.get(key, frozenset()))
        captured = self._captured(key, call, options, neighbour, room_bytes)
        announce_checkpoints(self.callee, captured.joint, (one.captured.joint for one in self))
        self._note_reads(captured.reads.attributes(self.callee.modules))
        settled = self.signature(Arguments.of(call.args, call.kwargs))  # a first run changed it
        self._detached[settled] = self._detached.get(key, frozenset())
        if call.numbers and not captured.joint.takes_numbers:
            self._deciding.add(settled)
        made = Specialisation(settled, captured, is_further=neighbour is not None)
        timed = options.costs == "measured" and not options.compile
        if timed and captured.graph.device.kind == "cpu":
            made.recall_costs(options)
        made.recall_plans(options)
        made.use(now)
        self._by_signature.setdefault(settled, []).append(made)
        self._forget_oldest()
        return made

    def _note_reads(self, read: ReadAttributes | None) -> None:
        """Note which attributes one more captured call has read."""
        if not len(self):
            self._read = read
        elif self._read is not None:
            self._read = self._read.joined(read)

    def _forget_oldest(self) -> None:
        while len(every := list(self)) > _MOST_KEPT:
            oldest = min(every, key=lambda one: one.used)
            oldest.forget_plans()
            for key, alike in list(self._by_signature.items()):
                self._by_signature[key] = [one for one in alike if one is not oldest]
                if not self._by_signature[key]:
                    del self._by_signature[key]

    def _captured(
        self,
        key: Any,
        call: TracedCall,
        options: Options,
        neighbour: Graph | None,
        room_bytes: int | None,
    ) -> Captured:
        captured, call = capture_step_around_data(
            call,
            options,
            self.callee.name,
            neighbour,
            watched=options.ranks is None,
            room_bytes=room_bytes,
            postpones=neighbour is None and may_postpone(options),
        )
        self._detached[key] = captured.joint.detached
        self._changing |= captured.joint.opaque.changing
        return captured

    def _neighbour(self, key: Any) -> Graph | None:
        """Return the graph of the same call on other sizes or answers, its own costs preferred."""
        alike = [
            (not one.is_further, one.used, other)
            for other, specialisations in self._by_signature.items()
            for one in specialisations
            if other == key or differ_in_sizes_only(other, key)
        ]
        if not alike:
            return None
        known = max(alike, key=lambda one: one[:2])[2]
        self._detached.setdefault(key, self._detached.get(known, frozenset()))
        return max(self._by_signature[known], key=lambda one: one.used).captured.graph

    # -- letting go ---------------------------------------------------------------------------

    def forget(self, one: Specialisation) -> None:
        """Drop what was captured for a signature."""
        self._by_signature.pop(one.key, None)

    def forget_all(self) -> None:
        """Drop all that was captured; what is known for capturing stays."""
        for one in self:
            one.forget_plans()
        self._by_signature.clear()

    def may_repeat(self, one: Specialisation) -> bool:
        """Whether a step may be run again in its backward: so it was, or none has been seen."""
        return one not in self._shown or one.key in self._repeated

    def note_repeated(self, one: Specialisation) -> None:
        """Note that backward runs through calls of a step more than once."""
        self._repeated.add(one.key)

    def learn_outputs(self, one: Specialisation, run: Run) -> None:
        """Note which outputs have received gradients; drop a plan that is made for others."""
        used, unused = run.reached.used, run.reached.unused
        if not unused and self._shown.get(one) == used:
            return  # as in the step before
        self._shown[one] = used
        self._takes_more |= bool(run.reached.unplanned)
        before = self._detached.get(one.key, frozenset())
        self._usage.note(one.key, run.reached)
        unused = self._usage.settled(one.key, one.captured)
        self._detached[one.key] = (before | unused) - used
        if self._detached[one.key] == before:
            return
        self.forget(one)
        if unused:
            announce(f"output(s) {sorted(unused)} receive no gradient: planning without them")


def _fulfils(captured: Captured, inputs: list[Any]) -> bool:
    joint = captured.joint
    pairs = zip(joint.placeholders, joint.sources, strict=True)
    placeholders = [node for node, source in pairs if source.kind != "tangent"]
    tensors = dict(zip(placeholders, inputs, strict=True))
    return all(condition.holds(tensors) for condition in captured.conditions)
