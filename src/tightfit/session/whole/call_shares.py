"""The part of the budget that a call of a whole step has, while others await their backward."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from tightfit.graph.ir import Graph
from tightfit.plan.plan import Gradients, Plan
from tightfit.progress import announce
from tightfit.session.memory.account import Account, expected_bytes_of, lasting_bytes_of
from tightfit.session.memory.surroundings import Share, Surroundings
from tightfit.session.options import Options
from tightfit.session.step.presumed import KeptRange, common_fraction
from tightfit.session.step.window import Awaited, Window
from tightfit.session.whole.advice import OpenCalls
from tightfit.session.whole.planning import kept_bytes, most_kept, quick_range, rough_range
from tightfit.session.whole.specialisation import Specialisation

_MOST_PRESUMED = 4
_REMEMBERED = 8


@dataclass(eq=False)
class _Kind:
    """The calls of one captured step; it does not keep the step alive."""

    owner: weakref.ref[Account]  # of their callable
    input_bytes: int
    # Bytes allocated between the call before and such a call, for the last few: new inputs and
    # memory of the code between
    arrived_bytes: deque[int] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    # Bytes that plans may keep, by the kind of gradients and whether they all exist
    ranges: dict[tuple[Gradients, bool], KeptRange] = field(default_factory=dict)
    last: tuple[Graph, Plan] | None = None  # by which such a call ran last

    def note_plan(self, graph: Graph, plan: Plan | None) -> None:
        self.last = None if plan is None else (graph, plan)

    @property
    def kept_bytes(self) -> int:
        """Bytes that the last such call kept for its backward; 0: not known."""
        return 0 if self.last is None else kept_bytes(*self.last)

    def note_range(self, key: tuple[Gradients, bool], found: KeptRange) -> None:
        self.ranges[key] = found

    def note_arrived(self, arrived_bytes: int) -> None:
        self.arrived_bytes.append(arrived_bytes)

    @property
    def arriving_bytes(self) -> int:
        """Bytes to expect before such a call in addition to those of its plan."""
        return max(self.arrived_bytes, default=self.input_bytes)

    def forget(self) -> None:
        self.ranges.clear()

    @property
    def most_needed(self) -> KeptRange | None:
        """The largest of its ranges; None: none is known."""
        known = self.ranges.values()
        if not known:
            return None
        return KeptRange(
            max(each.least_bytes for each in known),
            max(each.most_bytes for each in known),
            max(each.working_bytes for each in known),
        )


_Window: TypeAlias = Window[_Kind]


class CallShares:
    """Divides a budget among the calls of one step, those of other callables included.

    Each call has room in addition to the tensors that others keep, in any order of their backwards.
    Gradients that another backward of the callable has made are added. Room is left for calls that
    followed in earlier steps, and after the very first call for a few more, where they fit.
    """

    def __init__(self, name: str, account: Account) -> None:
        self._name = name
        self._account = account
        self._window: _Window = Window()
        self._open: list[_Kind] = []
        self._to_come: list[_Kind] = []
        self._presumed = 0
        self._announced_calls = 1
        self._presumed_for: Specialisation | None = None  # whose first call has left room
        self._kinds: weakref.WeakKeyDictionary[Specialisation, _Kind] = weakref.WeakKeyDictionary()

    # -- the current step -------------------------------------------------------------------

    def window(self, options: Options) -> _Window:
        """Return the current step: one for all callables that share a budget."""
        return self._window if options.shared is None else options.shared.window

    def was_alone(self, options: Options) -> bool:
        return self.window(options).was_alone

    def is_new(self, spec: Specialisation, options: Options) -> bool:
        """Whether such a call has never followed those that are open.

        It runs with least memory, as calls that come before its backward are unknown.
        """
        return options.is_shared and not self.window(options).knows(self._kind(spec))

    def called(
        self, spec: Specialisation, call: Awaited, options: Options, live_bytes: int | None
    ) -> None:
        """Note that a call runs; `live_bytes`: those of the process at its begin."""
        window, kind = self.window(options), self._kind(spec)
        follows = window.begins(kind, call)
        if follows and live_bytes is not None and window.forward_end_bytes is not None:
            kind.note_arrived(max(0, live_bytes - window.forward_end_bytes))

    def begin(
        self,
        spec: Specialisation,
        alone: Callable[[], Surroundings],
        options: Options,
        *,
        presumes: bool,
    ) -> None:
        """Predict which calls come before the backward of a call that begins.

        `alone`: returns the memory resident around it, without its share of the budget. `presumes`:
        whether a first call may leave room for further calls that may come.
        """
        window, kind = self.window(options), self._kind(spec)
        is_known = window.knows(kind)
        follow = window.to_come(kind) if is_known else window.to_come(kind, _of_one_callable)
        self._open, self._to_come = window.open, [*follow]
        own_open = len(self._own(self._open))
        if self._open:
            self._announce_open_calls(own_open + 1)
        else:
            self._forget_presumed()
        if self.is_new(spec, options):
            self._range_of(spec, alone(), options)  # and with it the plan that keeps least
        if options.in_flight is not None:
            more = options.in_flight - own_open - 1 - len(self._own(self._to_come))
            self._to_come += [kind] * more
        elif not (is_known or self._to_come or options.is_shared) and _may_presume(options):
            if own_open and self._presumed <= own_open:
                self._presume_more(spec, alone(), options)
            elif presumes and not own_open and not window.has_history:
                self._presume_first(spec, alone(), options)
            self._to_come = [kind] * (self._presumed - own_open - 1)

    def is_alone(self, spec: Specialisation, options: Options) -> bool:
        """Whether all calls so far were like this call, and none was open with another."""
        if options.in_flight is not None or options.is_shared or self._presumed_for is not None:
            return False
        return not (self._open or self._to_come) and self._window.has_only(self._kind(spec))

    @property
    def has_others(self) -> bool:
        """Whether other calls are open, or expected before the backward of this call."""
        return bool(self._open or self._to_come)

    @property
    def presumes(self) -> bool:
        """Whether room is left for further calls that may never come."""
        return self._presumed_for is not None and not self._open

    def stop_expecting_call(self) -> None:
        """Leave no room for calls that may never come."""
        self._presumed, self._to_come, self._presumed_for = 0, [], None

    def prepared(self, spec: Specialisation, *, runs_next: bool) -> None:
        """Forget a call that was only planned; the next that runs is the first."""
        if runs_next:
            spec.forget_plans()
            self.stop_expecting_call()

    def forget_needs(self, spec: Specialisation) -> None:
        """Forget the needs of a step, and the calls that were presumed for it."""
        self._kind(spec).forget()
        self._presumed = 0

    def _forget_presumed(self) -> None:
        """As a step begins, drop plans that left room for calls, if none came."""
        self._presumed = 0
        if self._presumed_for is not None and not self._to_come:
            self._presumed_for.forget_plans()
        self._presumed_for = None

    def _announce_open_calls(self, calls: int) -> None:
        if calls >= 2 * self._announced_calls:  # a game may have hundreds
            self._announced_calls = calls
            announce(
                f"{self._name} has {calls} planned calls or graphs open before a backward: each "
                "has a part of the budget"
            )

    def _own(self, kinds: Sequence[_Kind]) -> list[_Kind]:
        return [kind for kind in kinds if kind.owner() is self._account]

    def _kind(self, spec: Specialisation) -> _Kind:
        kind = self._kinds.get(spec)
        if kind is None:
            input_bytes = spec.captured.graph.constants_bytes["inputs"]
            kind = self._kinds[spec] = _Kind(weakref.ref(self._account), input_bytes)
        return kind

    def note_plan(self, spec: Specialisation, graph: Graph, plan: Plan | None) -> None:
        """Note the plan of a call; None: it was compiled."""
        self._kind(spec).note_plan(graph, plan)

    # -- sharing ------------------------------------------------------------------------------

    def share(self, spec: Specialisation, alone: Surroundings, options: Options) -> Share:
        """Return the share of the call that has begun.

        `alone`: memory resident around it, with tensors kept by earlier calls.
        """
        own = self._own([*self._open, *self._to_come])
        if not own and not self._to_come:
            return Share(options.planned_bytes)
        kind = self._kind(spec)
        ranges = self._ranges(spec, alone, options)
        working = max(ranges[each].working_bytes for each in (kind, *own, *self._to_come))
        ranges = {each: replace(known, working_bytes=working) for each, known in ranges.items()}
        waiting_bytes = self._gradients_of_another() if own else 0
        held_bytes = alone.graph_of(spec.captured).constant_bytes
        arriving_bytes = sum(each.arriving_bytes for each in self._to_come)
        calls = [kind, *self._to_come]
        base_bytes = held_bytes + waiting_bytes + self._account.new_gradient_bytes()
        base_bytes += arriving_bytes
        every = {each: ranges[each].times(calls.count(each)) for each in calls}
        fraction = common_fraction(every, base_bytes, options.planned_bytes)
        kept_bytes = [ranges[each].at(fraction).saved_bytes for each in calls]
        reserved_bytes = sum(kept_bytes[1:]) + arriving_bytes
        budget_bytes = options.planned_bytes - waiting_bytes - reserved_bytes
        others_bytes = max(0, budget_bytes - held_bytes - kept_bytes[0])
        if fraction == 1.0:
            others_bytes = min(others_bytes, working)
        # calls before a new call leave as much to it as they take, once they are known
        others = self._open if self.is_new(spec, options) else calls[1:] if fraction < 1.0 else ()
        spans = [ranges[each].span_bytes for each in (kind, *others)]
        part = spans[0] / sum(spans) if spans[0] and fraction > 0.0 else 1.0
        return Share(budget_bytes, others_bytes, reserved_bytes, part)

    def open_calls(self, spec: Specialisation, alone: Surroundings, options: Options) -> OpenCalls:
        own, kinds = self._own(self._open), [*self._to_come]
        if not self._open and not kinds:
            return OpenCalls(0)
        kind = self._kind(spec)
        ranges = self._ranges(spec, alone, options)
        least_bytes = 0
        if len(own) > 1 and not self.window(options).knows(kind):  # how many come is unknown
            further = len(own) + 1 - len(self._own(kinds))
            kinds += [kind] * further
            least_bytes = further * ranges[kind].least_bytes
        spare_bytes = sum(max(0, e.kept_bytes - ranges[e].least_bytes) for e in self._open)
        if not options.needs_plans:  # what calls save can be freed while they wait
            ranges = {each: replace(known, least_bytes=0) for each, known in ranges.items()}
            waiting = self.window(options).waiting
            spare_bytes = sum(kind.kept_bytes for run, kind in waiting if not run.is_freed)
        least_bytes += sum(ranges[each].least_bytes + each.arriving_bytes for each in kinds)
        if own or self._own(kinds):
            least_bytes += self._gradients_of_another()
        return OpenCalls(
            len(own),
            least_bytes,
            ranges[kind].least_bytes + ranges[kind].working_bytes,
            self._all_calls_bytes(kind, ranges, options) if options.is_shared else 0,
            spare_bytes,
        )

    def _all_calls_bytes(
        self, kind: _Kind, ranges: Mapping[_Kind, KeptRange], options: Options
    ) -> int:
        """Return bytes that all calls of the step need.

        Open calls hold their kept tensors already. A callable that is called a second time before a
        backward may be called once more, and its gradients are added up.
        """
        members = [self._account, *options.others_in_budget(self._account)]
        lasting_bytes = lasting_bytes_of(members)
        limiter = self._account.limiter
        sharing_bytes = max(0, limiter.held_bytes() - lasting_bytes) if limiter is not None else 0
        coming = [kind, *self._to_come]
        again = {each.owner() for each in coming} & {each.owner() for each in self._open}
        if again:
            coming.append(kind)
        waiting = (m.new_gradient_bytes() + m.gradient_bytes() for m in again if m is not None)
        arriving = (each.arriving_bytes for each in coming[1:])  # those of this call exist
        return (
            lasting_bytes
            + expected_bytes_of(members)
            + sharing_bytes
            + max(waiting, default=0)
            + max(ranges[each].working_bytes for each in (*self._open, *coming))
            + sum(ranges[each].least_bytes for each in coming)
            + sum(arriving)
        )

    def _ranges(
        self, spec: Specialisation, alone: Surroundings, options: Options
    ) -> dict[_Kind, KeptRange]:
        """Return bytes that the open and the expected calls of the step may keep."""
        own = self._range_of(spec, alone, options)
        others = {each: each.most_needed or own for each in (*self._open, *self._to_come)}
        return others | {self._kind(spec): own}

    def _range_of(self, spec: Specialisation, alone: Surroundings, options: Options) -> KeptRange:
        kind, new_bytes = self._kind(spec), self._account.new_gradient_bytes()
        key = alone.gradients, new_bytes == 0
        if key not in kind.ranges:
            kind.note_range(key, quick_range(spec, alone, options, new_bytes))
        return kind.ranges[key]

    # -- calls that were not seen yet ---------------------------------------------------------

    def _presume_first(self, spec: Specialisation, alone: Surroundings, options: Options) -> None:
        """Presume a few calls if they fit; none if two fit anyway."""
        room_bytes = self._room_bytes(spec, alone, options)
        new_bytes = self._account.new_gradient_bytes()
        peak_bytes, kept_bytes = most_kept(spec, alone, new_bytes)
        if peak_bytes + kept_bytes + self._kind(spec).input_bytes <= room_bytes:
            return
        found = rough_range(spec, alone, options, new_bytes)
        if found is None:
            return
        input_bytes = self._kind(spec).input_bytes
        calls = min(_MOST_PRESUMED, _fitting_calls(room_bytes, found, input_bytes))
        if calls > 1:
            self._kind(spec).note_range((alone.gradients, new_bytes == 0), found)
            self._presumed, self._presumed_for = calls, spec

    def _presume_more(self, spec: Specialisation, alone: Surroundings, options: Options) -> None:
        room_bytes = self._room_bytes(spec, alone, options)
        found, calls = self._range_of(spec, alone, options), len(self._open)
        most = max(1, _MOST_PRESUMED - calls)
        fit = _fitting_calls(room_bytes, found, self._kind(spec).input_bytes)
        self._presumed = calls + max(0, min(most, fit))

    def _room_bytes(self, spec: Specialisation, alone: Surroundings, options: Options) -> int:
        room_bytes = options.planned_bytes - alone.graph_of(spec.captured).constant_bytes
        room_bytes -= self._account.new_gradient_bytes() + self._gradients_of_another()
        return max(0, room_bytes)

    def _gradients_of_another(self) -> int:
        """Return bytes of the gradients of another call until autograd has added them up."""
        return self._account.new_gradient_bytes() + self._account.gradient_bytes()


def _of_one_callable(kind: _Kind, other: _Kind) -> bool:
    return kind.owner == other.owner


def _fitting_calls(room_bytes: int, found: KeptRange, input_bytes: int) -> int:
    """Return how many calls fit if each keeps least; the inputs of one exist already."""
    room_bytes += input_bytes - found.working_bytes
    return room_bytes // max(1, found.least_bytes + input_bytes)


def _may_presume(options: Options) -> bool:
    """Whether a first plan may leave room for calls that were not seen yet."""
    return options.searches_by_default and options.in_flight is None
