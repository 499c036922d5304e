"""Which part of the budget a call of a whole step has, with others that await their backward."""

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
from tightfit.session.step.presumed import KeptRange, evenly
from tightfit.session.step.window import Awaited, Window
from tightfit.session.whole.advice import OpenCalls
from tightfit.session.whole.planning import kept_bytes, most_kept, quick_range, rough_range
from tightfit.session.whole.specialisation import Specialisation

_MOST_LOOKED_FOR = 4
_REMEMBERED = 8


@dataclass(eq=False)
class _Kind:
    """The calls of one captured step; it does not keep the step alive."""

    owner: weakref.ref[Account]  # of their callable, weakly
    input_bytes: int
    # Bytes that had come since the call before, for the last few: new inputs, each once, and memory
    # of the code between
    arrived_bytes: deque[int] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    # Bytes that plans may keep, by the kind of gradients
    ranges: dict[tuple[Gradients, bool], KeptRange] = field(default_factory=dict)
    # The plan by which such a call ran last, and its graph
    last: tuple[Graph, Plan] | None = None

    def runs_by(self, graph: Graph, plan: Plan | None) -> None:
        """Note the plan by which such a call runs; None: it was compiled."""
        self.last = None if plan is None else (graph, plan)

    @property
    def kept_bytes(self) -> int:
        """Bytes that such a call has kept for its backward; 0: not known."""
        return 0 if self.last is None else kept_bytes(*self.last)

    def learn(self, key: tuple[Gradients, bool], found: KeptRange) -> None:
        """Note the bytes that plans of it may keep, for some gradients."""
        self.ranges[key] = found

    def follows(self, arrived_bytes: int) -> None:
        """Note the bytes that came between such a call and the previous call."""
        self.arrived_bytes.append(arrived_bytes)

    @property
    def arriving_bytes(self) -> int:
        """Bytes that come with such a call in addition to those of its plan."""
        return max(self.arrived_bytes, default=self.input_bytes)

    def forget(self) -> None:
        """Forget which bytes its plans may keep."""
        self.ranges.clear()

    @property
    def most_needed(self) -> KeptRange | None:
        """The most that its plans keep and work with, for any gradients."""
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

    Each call works in addition to tensors kept by others, in whichever order their backwards come.
    Gradients that another backward of the callable has made come on top. Calls that were seen to
    follow have room left; so have a few more after the very first call, where that can be.
    """

    def __init__(self, name: str, account: Account) -> None:
        self._name = name
        self._account = account
        self._window: _Window = Window()
        self._open: list[_Kind] = []
        self._to_come: list[_Kind] = []
        self._presumed = 0
        self._announced_calls = 1
        self._looked: Specialisation | None = None  # whose first call has left room
        self._kinds: weakref.WeakKeyDictionary[Specialisation, _Kind] = weakref.WeakKeyDictionary()

    # -- the current step -------------------------------------------------------------------

    def window(self, options: Options) -> _Window:
        """Return the current step: one for all callables that share a budget."""
        return self._window if options.shared is None else options.shared.window

    def was_alone(self, options: Options) -> bool:
        """Whether no call has been open along with another in the last step."""
        return self.window(options).was_alone

    def is_new(self, spec: Specialisation, options: Options) -> bool:
        """Whether such a call has never followed those that are open: it runs with least memory.

        Memory of others that are called before its backward is unknown yet.
        """
        return options.is_shared and not self.window(options).knows(self._kind(spec))

    def called(
        self, spec: Specialisation, call: Awaited, options: Options, live_bytes: int | None
    ) -> None:
        """Note that a call runs, and how much is given out in the process by then."""
        window, kind = self.window(options), self._kind(spec)
        follows = window.begins(kind, call)
        if follows and live_bytes is not None and window.forward_end_bytes is not None:
            kind.follows(max(0, live_bytes - window.forward_end_bytes))

    def begin(
        self,
        spec: Specialisation,
        alone: Callable[[], Surroundings],
        options: Options,
        *,
        looks: bool,
    ) -> None:
        """Find out which calls are to come before the backward of a call that begins.

        `alone`: returns the memory resident around it, independent of the budget. `looks`: whether
        a first call may leave room for a second call to see whether it comes.
        """
        window, kind = self.window(options), self._kind(spec)
        is_known = window.knows(kind)
        follow = window.to_come(kind) if is_known else window.to_come(kind, _of_one_callable)
        self._open, self._to_come = window.open, [*follow]
        own_open = len(self._own(self._open))
        if self._open:
            self._tell(own_open + 1)
        else:
            self._look_back()
        if self.is_new(spec, options):
            self._range_of(spec, alone(), options)  # and with it the plan that keeps least
        if options.in_flight is not None:
            more = options.in_flight - own_open - 1 - len(self._own(self._to_come))
            self._to_come += [kind] * more
        elif not (is_known or self._to_come or options.is_shared) and _may_presume(options):
            if own_open and self._presumed <= own_open:
                self._leave_rest(spec, alone(), options)
            elif looks and not own_open and not window.has_history:
                self._leave_room(spec, alone(), options)
            self._to_come = [kind] * (self._presumed - own_open - 1)

    def is_alone(self, spec: Specialisation, options: Options) -> bool:
        """Whether a call is like all before it, of which none was open with another."""
        if options.in_flight is not None or options.is_shared or self._looked is not None:
            return False
        return not (self._open or self._to_come) and self._window.has_only(self._kind(spec))

    @property
    def has_company(self) -> bool:
        """Whether other calls await their backward, or are to come before that of this call."""
        return bool(self._open or self._to_come)

    @property
    def looks(self) -> bool:
        """Whether the call leaves room only to see whether another comes."""
        return self._looked is not None and not self._open

    def stop_expecting_call(self) -> None:
        """Leave no room for a call that might have come: there is no room to leave."""
        self._presumed, self._to_come, self._looked = 0, [], None

    def prepared(self, spec: Specialisation, *, runs_next: bool) -> None:
        """Forget a call that was only planned: the next that runs leaves room as a first call."""
        if runs_next:
            spec.forget_plans()
            self.stop_expecting_call()

    def forget_needs(self, spec: Specialisation) -> None:
        """Forget the needs of a step, and the calls that were presumed for it."""
        self._kind(spec).forget()
        self._presumed = 0

    def _look_back(self) -> None:
        """See whether a call has come that room was left for: the next step begins."""
        self._presumed = 0
        if self._looked is not None and not self._to_come:
            self._looked.forget_plans()
        self._looked = None

    def _tell(self, calls: int) -> None:
        if calls >= 2 * self._announced_calls:  # a game may take hundreds: not of each of them
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

    def runs_by(self, spec: Specialisation, graph: Graph, plan: Plan | None) -> None:
        """Note the plan by which a call runs; None: it was compiled."""
        self._kind(spec).runs_by(graph, plan)

    # -- sharing ------------------------------------------------------------------------------

    def share(self, spec: Specialisation, alone: Surroundings, options: Options) -> Share:
        """Return the part of the call that has begun.

        `alone`: memory resident around it, tensors kept by earlier calls included.
        """
        own = self._own([*self._open, *self._to_come])
        if not own and not self._to_come:
            return Share(options.planned_bytes)
        kind = self._kind(spec)
        ranges = self._ranges(spec, alone, options)
        working = max(ranges[each].working_bytes for each in (kind, *own, *self._to_come))
        ranges = {each: replace(known, working_bytes=working) for each, known in ranges.items()}
        waiting_bytes = self._gradients_of_another() if own else 0
        held_bytes = alone.around(spec.captured).constant_bytes
        arriving_bytes = sum(each.arriving_bytes for each in self._to_come)
        calls = [kind, *self._to_come]
        base_bytes = held_bytes + waiting_bytes + self._account.new_gradient_bytes()
        base_bytes += arriving_bytes
        every = {each: ranges[each].times(calls.count(each)) for each in calls}
        fraction = evenly(every, base_bytes, options.planned_bytes)
        kept_bytes = [ranges[each].at(fraction).saved_bytes for each in calls]
        reserved_bytes = sum(kept_bytes[1:]) + arriving_bytes
        budget_bytes = options.planned_bytes - waiting_bytes - reserved_bytes
        others_bytes = max(0, budget_bytes - held_bytes - kept_bytes[0])
        if fraction == 1.0:
            others_bytes = min(others_bytes, working)
        # once they are known, those before a new call leave as much to it as they take
        others = self._open if self.is_new(spec, options) else calls[1:] if fraction < 1.0 else ()
        spans = [ranges[each].span_bytes for each in (kind, *others)]
        part = spans[0] / sum(spans) if spans[0] and fraction > 0.0 else 1.0
        return Share(budget_bytes, others_bytes, reserved_bytes, part)

    def open_calls(self, spec: Specialisation, alone: Surroundings, options: Options) -> OpenCalls:
        """Return the calls that are open along with a call, and the gradients that they add to."""
        own, kinds = self._own(self._open), [*self._to_come]
        if not self._open and not kinds:
            return OpenCalls(0)
        kind, in_company = self._kind(spec), options.is_shared
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
            self._company_bytes(kind, ranges, options) if in_company else 0,
            spare_bytes,
        )

    def _company_bytes(
        self, kind: _Kind, ranges: Mapping[_Kind, KeptRange], options: Options
    ) -> int:
        """Return a size with room for all calls of the step.

        Calls that are open hold their kept tensors already. A callable that is called a second time
        before a backward may be called once more, and its gradients are added up.
        """
        members = [self._account, *options.others_in_budget(self._account)]
        lasting_bytes = lasting_bytes_of(members)
        keeper = self._account.keeper
        sharing_bytes = max(0, keeper.held_bytes() - lasting_bytes) if keeper is not None else 0
        coming = [kind, *self._to_come]
        again = {each.owner() for each in coming} & {each.owner() for each in self._open}
        if again:
            coming.append(kind)
        waiting = (m.new_gradient_bytes() + m.gradient_bytes() for m in again if m is not None)
        arriving = (each.arriving_bytes for each in coming[1:])  # that of this call is there
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
        """Return bytes that calls of the step may keep: those awaiting backward or to come."""
        own = self._range_of(spec, alone, options)
        others = {each: each.most_needed or own for each in (*self._open, *self._to_come)}
        return others | {self._kind(spec): own}

    def _range_of(self, spec: Specialisation, alone: Surroundings, options: Options) -> KeptRange:
        kind, new_bytes = self._kind(spec), self._account.new_gradient_bytes()
        key = alone.gradients, new_bytes == 0
        if key not in kind.ranges:
            kind.learn(key, quick_range(spec, alone, options, new_bytes))
        return kind.ranges[key]

    # -- calls that were not seen yet ---------------------------------------------------------

    def _leave_room(self, spec: Specialisation, alone: Surroundings, options: Options) -> None:
        """Presume a few calls if they fit; none if two fit without room that is left for them."""
        room_bytes = self._room_bytes(spec, alone, options)
        new_bytes = self._account.new_gradient_bytes()
        peak_bytes, kept_bytes = most_kept(spec, alone, new_bytes)
        if peak_bytes + kept_bytes + self._kind(spec).input_bytes <= room_bytes:
            return
        found = rough_range(spec, alone, options, new_bytes)
        if found is None:
            return
        input_bytes = self._kind(spec).input_bytes
        calls = min(_MOST_LOOKED_FOR, _fitting_calls(room_bytes, found, input_bytes))
        if calls > 1:
            self._kind(spec).learn((alone.gradients, new_bytes == 0), found)
            self._presumed, self._looked = calls, spec

    def _leave_rest(self, spec: Specialisation, alone: Surroundings, options: Options) -> None:
        """Presume a few more calls than have come, as far as they fit."""
        room_bytes = self._room_bytes(spec, alone, options)
        found, calls = self._range_of(spec, alone, options), len(self._open)
        most = max(1, _MOST_LOOKED_FOR - calls)
        fit = _fitting_calls(room_bytes, found, self._kind(spec).input_bytes)
        self._presumed = calls + max(0, min(most, fit))

    def _room_bytes(self, spec: Specialisation, alone: Surroundings, options: Options) -> int:
        room_bytes = options.planned_bytes - alone.around(spec.captured).constant_bytes
        room_bytes -= self._account.new_gradient_bytes() + self._gradients_of_another()
        return max(0, room_bytes)

    def _gradients_of_another(self) -> int:
        """Return bytes of another call's gradients until autograd has added them up."""
        return self._account.new_gradient_bytes() + self._account.gradient_bytes()


def _of_one_callable(one: _Kind, other: _Kind) -> bool:
    """Whether calls are of the same callable: as many are expected after either."""
    return one.owner == other.owner


def _fitting_calls(room_bytes: int, found: KeptRange, input_bytes: int) -> int:
    """Return how many calls fit if each keeps as little as it can; inputs of one call are there."""
    room_bytes += input_bytes - found.working_bytes
    return room_bytes // max(1, found.least_bytes + input_bytes)


def _may_presume(options: Options) -> bool:
    """Whether a first plan may leave room for calls that were not seen yet."""
    return options.searches_by_default and options.in_flight is None
