"""What is captured of a fitted callable, by signature and by what data decided."""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

from tightfit.capture.around_data import of_the_same_class
from tightfit.capture.calls.attributes import ReadAttributes
from tightfit.capture.calls.modules import SeenModules, hooked_modules
from tightfit.capture.calls.signature import call_signature, differ_in_sizes_only
from tightfit.capture.calls.structure import Arguments
from tightfit.capture.captured import (
    Captured,
    placeholder_tensors,
    tensors_of,
)
from tightfit.capture.handed import ReadsUnseen, is_handed, takes_numbers
from tightfit.capture.probe import probe
from tightfit.capture.side_effects.attributes import Kept, KeptTensors, forget
from tightfit.capture.traced_call import TracedCall
from tightfit.errors import first_of
from tightfit.execution.runtime import Run
from tightfit.graph.ir import Graph
from tightfit.plan.plan import Plan
from tightfit.progress import announce
from tightfit.session.callee import Callee
from tightfit.session.checkpoints import announce_checkpoints
from tightfit.session.options import Options
from tightfit.session.outputs import Usage
from tightfit.session.stages import capture_step_around_data
from tightfit.session.whole.decided import Decided
from tightfit.session.whole.postponed import may_postpone
from tightfit.session.whole.specialisation import Specialisation

__all__ = ["Captures"]

_MOST_KEPT = 16

Detached = frozenset[int]


class Captures:
    """The captured steps of a callee, and what is known by now for capturing further ones.

    Parameters
    ----------
    callee : Callee
        What is captured.

    Attributes
    ----------
    decided : Decided
        How often values decide otherwise, and which modules run as ops therefore.
    """

    def __init__(self, callee: Callee) -> None:
        self.callee = callee
        self._seen = SeenModules(callee.modules)
        self.decided = Decided()
        self._by_signature: dict[Any, list[Specialisation]] = {}  # several if inputs decide
        self._detached: dict[Any, Detached] = {}
        self._usage = Usage()
        self._takes_more = False  # than a loss, of what a call returns
        self._shown: weakref.WeakKeyDictionary[Specialisation, frozenset[int]]
        self._shown = weakref.WeakKeyDictionary()  # which outputs had gradients the last time
        self._repeated: set[Any] = set()  # signatures of calls with several backwards
        self._kept: frozenset[Kept] = frozenset()
        handed = is_handed(callee.function)
        self._read = ReadsUnseen().attributes(callee.modules) if handed else None  # None: any
        self._changing: frozenset[tuple[str, str]] = frozenset()  # attributes, by opaque modules
        self._deciding: set[Any] = set()  # signatures of calls all of whose numbers decide
        self._warned_hooks: set[str] = set()

    def __iter__(self) -> Iterator[Specialisation]:
        """Iterate over all that was captured so far."""
        return (one for alike in self._by_signature.values() for one in alike)

    def __len__(self) -> int:
        """Return for how many signatures steps were captured."""
        return len(self._by_signature)

    def signature(self, given: Arguments) -> Any:
        """Return what a step depends on: inputs, modules, modes."""
        kept = self._changing.union(place[:2] for place in self._kept)
        return call_signature(
            given.leaves, given.spec, self._seen, self.callee.root, kept, self._read
        )

    def inputs(self, one: Specialisation, given: Arguments) -> list[Any]:
        """Return the tensors of the placeholders of a call whose signature was asked for."""
        joint = one.captured.joint
        if joint.outside:
            return placeholder_tensors(joint, self.callee.modules, given.leaves)
        return tensors_of(joint, given.leaves, self._seen.tensor)

    def find(self, key: Any, given: Arguments) -> Specialisation | None:
        """Return what was captured for a signature, where inputs decide the same again."""
        alike = self._by_signature.get(key, ())
        for found in sorted(alike, key=lambda one: -one.used):
            if self._holds(found, given):
                self.decided.note_served(key)
                return found
        return None

    def serves(self, one: Specialisation, given: Arguments) -> bool:
        """Whether a captured step is that of a call, as modules and inputs are now."""
        return self.signature(given) == one.key and self._holds(one, given)

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
        conditions = one.captured.conditions
        if not conditions:
            return True
        joint = one.captured.joint
        pairs = zip(joint.placeholders, joint.sources, strict=True)
        placeholders = [node for node, source in pairs if source.kind != "tangent"]
        tensors = dict(zip(placeholders, self.inputs(one, given), strict=True))
        return all(condition.holds(tensors) for condition in conditions)

    def find_answering(
        self, unfit: Specialisation, answers: Any, given: Arguments
    ) -> Specialisation | None:
        """Return another one of the same signature, captured for what data decide now."""
        for found in self._by_signature.get(unfit.key, ()):
            is_other = found is not unfit and found.captured.reads.hold()
            decides = is_other and found.captured.joint.answers == answers
            if decides and self._fulfils(found, given):
                found.captured.reads.fetch()
                return found
        return None

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

    # -- data that decide in every step -------------------------------------------------------

    def deciding_inputs(self, key: Any, given: Arguments) -> Specialisation | None:
        """Note that nothing serves a call; return what was captured last if inputs often decide.

        None unless every call decides otherwise than those that are known, and that is new.
        """
        last = max(self._by_signature.get(key, ()), key=lambda one: one.used, default=None)
        if last is None:
            return None
        joint = last.captured.joint
        if joint.decisions.hold(given.leaves, {**self.callee.modules, **joint.outside}):
            return None  # something else has changed
        return last if self.decided.note_missed(key) else None

    def run_as_ops(self, unfit: Specialisation, *, by_inputs: bool) -> frozenset[str]:
        """Let the modules in which values decide run as one op; return their names.

        Those in which computed values do; `by_inputs`: or what follows from inputs alone. The
        outermost one, whose name is "", does so if it is all there is; where inputs decide in it,
        no module does.
        """
        modules = self.callee.modules
        joint = unfit.captured.joint
        asking = {question.inside for question in joint.questions}
        if by_inputs:
            asking |= joint.decisions.inside
            if "" in asking:
                return frozenset()
        whole = self.callee.root is not None and len(modules) == 1 and not self._kept
        if "" in asking and whole:
            asking = {""}
        asking -= set() if whole else {""}
        asking = {n for n in asking if not any(n.startswith(f"{other}.") for other in asking)}
        named = frozenset(n for name in asking for n in of_the_same_class(modules, name) | {name})
        self.decided.run_as_ops(named)
        return named

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
            opaque=self.decided.opaque,
            answered=self.decided.answered,
            loss_alone=not self._takes_more,
            numbers=not compiled and key not in self._deciding and self._may_change(key, given),
        )

    def _may_change(self, key: Any, given: Arguments) -> bool:
        """Whether numbers may change that a call reads."""
        return key in self._by_signature or takes_numbers(self.callee.function, given.args)

    def with_answers(self, call: TracedCall) -> TracedCall:
        """Return a call with what data decide in it now, found out by running it."""
        found = probe(call)
        return dataclasses.replace(call, answers=found.answers, examples=found.examples)

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
        self._warn_of_hooks()
        if self._kept:  # it has left tensors in attributes before: no trace need fail of that
            call = dataclasses.replace(call, function=KeptTensors(call.function, call.modules))
        captured, call = capture_step_around_data(
            call,
            options,
            self.callee.name,
            neighbour,
            keeping=True,
            watched=options.ranks is None,
            room_bytes=room_bytes,
            postpones=neighbour is None and may_postpone(options),
        )
        self._detached[key] = captured.joint.detached
        self.decided.note_captured(call.opaque, call.answered)
        self._changing |= captured.joint.opaque.changing
        if isinstance(call.function, KeptTensors):
            self._kept |= call.function.places
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

    def _warn_of_hooks(self) -> None:
        """Name the inner modules whose hooks become part of the captured step, once."""
        hooked = hooked_modules(self.callee.modules, self.callee.root)
        names = [n for n, _ in hooked if n not in self._warned_hooks]
        if not names or is_handed(self.callee.function):  # in every step Dynamo does what they do
            return
        self._warned_hooks.update(names)
        named = first_of([repr(name) for name in names])
        warnings.warn(
            f"hooks on module {named} are captured with the step: their operators run every step, "
            "their Python code does not run again. Adding or removing a hook makes a new plan",
            stacklevel=11,
        )

    # -- letting go ---------------------------------------------------------------------------

    def forget_left(self, one: Specialisation) -> None:
        """Let go of what the last forward left in attributes: the plan of this one counts its."""
        forget(self.callee.modules, one.captured.left)

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
