"""Several calls of one callable that await their backward at once: what each may keep."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable

from tightfit.plan.plan import Gradients
from tightfit.planners.registry import DEFAULT
from tightfit.progress import announce
from tightfit.session.memory.account import Account
from tightfit.session.memory.budget import Needs, Share, divided
from tightfit.session.memory.surroundings import Surroundings
from tightfit.session.options import Options
from tightfit.session.whole.advice import Beside
from tightfit.session.whole.planning import most_needs, quick_needs, rough_needs
from tightfit.session.whole.specialisation import Specialisation

__all__ = ["Flight"]

_REMEMBERED = 8
_MOST_LOOKED_FOR = 4


class Flight:
    """Calls of a callable that await their backward at once, each of them within one budget.

    Each works beside what the others keep, in whichever order their backwards come, and beside
    the gradients that another backward has made. What the first call finds free is divided so
    that what is left beside all that is kept suffices for the largest working set
    (`memory.budget.divided`); what a call may keep then stays the same until none is open.

    How many calls there will be is what the user has said, or what was seen before. The very
    first call leaves room for a few more, where that can be.

    Parameters
    ----------
    name : str
        Of the callable, for messages.
    account : Account
        What it holds.

    Attributes
    ----------
    calls : int
        How many calls the budget is divided for.
    """

    def __init__(self, name: str, account: Account) -> None:
        self.calls = 1
        self._name = name
        self._account = account
        self._open_calls = 0
        self._most_open = 1
        self._division: tuple[int, list[Needs]] | None = None  # what was divided, among what
        self._order: list[weakref.ref[Specialisation]] = []  # of the calls since none was open
        self._orders: dict[Hashable, list[weakref.ref[Specialisation]]] = {}
        self._beside: Hashable = None
        self._seen: dict[Hashable, deque[int]] = {}
        self._told = 1
        self._looked: Specialisation | None = None  # whose first call has left room
        self._needs: weakref.WeakKeyDictionary[Specialisation, dict[Gradients, Needs]] = (
            weakref.WeakKeyDictionary()
        )

    @property
    def is_alone(self) -> bool:
        """Whether no call has been open beside another one since the last one that began alone."""
        return self._most_open == 1

    def begin(
        self,
        one: Specialisation,
        around: Callable[[], Surroundings],
        options: Options,
        open_calls: int,
        *,
        looks: bool,
    ) -> None:
        """Note that a call begins; divide what it finds free if no other one is open.

        Parameters
        ----------
        one : Specialisation
            The step.
        around : callable
            Returns what lies around it, whatever the budget.
        options : Options
            The user's.
        open_calls : int
            Earlier ones that await their backward.
        looks : bool
            Whether a first call may leave room for a second one to see whether it comes.
        """
        self._open_calls = open_calls
        self._order = [*self._order[:open_calls], weakref.ref(one)]
        if open_calls:
            self._join(open_calls)
            is_new = self._division is None and not self._seen
            if is_new and _may_look(options) and not options.is_in_company:
                self._leave_rest(one, around(), options)
            return
        self._most_open, self._division = 1, None
        # a callable may be called more often in the company of others than without
        self._beside = frozenset(map(id, options.shared.open_members() if options.shared else ()))
        self.calls = self._expected(options)
        if self._looked is not None:
            if self.calls == 1:  # nobody has come: the plan left room for nothing
                self._looked.forget_plans()
            self._looked = None
        if self.calls > 1:
            self._divide(one, around(), options)
        elif looks and not self._seen and _may_look(options):
            self._leave_room(one, around(), options)

    def end(self) -> None:
        """Note that no call is open any more."""
        self._seen.setdefault(self._beside, deque(maxlen=_REMEMBERED)).append(self._most_open)
        self._orders[self._beside] = self._order

    @property
    def looks(self) -> bool:
        """Whether the call leaves room only to see whether another one comes."""
        return self._looked is not None and self._most_open == 1

    def look_no_more(self) -> None:
        """Leave no room for a call that might have come: there is none to leave."""
        self.calls, self._division, self._looked = 1, None, None

    def prepared(self, one: Specialisation, *, runs_next: bool) -> None:
        """Forget a call that was only planned: one that runs next leaves room as a first one."""
        if runs_next:
            one.forget_plans()
            self.look_no_more()

    def forget_needs(self, one: Specialisation) -> None:
        """Find out anew what a step needs; divide anew what was divided for a step never seen."""
        self._needs.pop(one, None)
        if not self._seen:
            self._division = None

    @property
    def waiting_bytes(self) -> int:
        """What gradients of another call take while autograd has yet to add them up."""
        return self._gradients_of_another() if self.calls > 1 else 0

    def share(
        self, one: Specialisation, around: Callable[[], Surroundings], options: Options
    ) -> Share:
        """Return the part of one call, beside what calls to come may keep."""
        if self.calls == 1:
            return Share(options.planned_bytes)
        return self._share(one, around(), options)

    def _share(self, one: Specialisation, alone: Surroundings, options: Options) -> Share:
        peak_bytes = options.planned_bytes - self.waiting_bytes
        own = self._needs_of(one, alone, options)
        if self._division is None:
            return Share(peak_bytes, own.working_bytes)
        kept_bytes = self._kept_bytes(own)
        to_come = self._to_come(own)
        peak_bytes -= sum(map(self._kept_bytes, to_come))
        others_bytes = peak_bytes - _lasting_bytes(one, alone) - kept_bytes
        part = 1 - len(to_come) / len(self._division[1])
        return Share(peak_bytes, max(0, others_bytes), max(part, 1 / len(self._division[1])))

    def _kept_bytes(self, needs: Needs) -> int:
        """Return what a call with such needs may keep of what was divided."""
        assert self._division is not None
        share = divided(*self._division, needs)
        return share.peak_bytes - share.others_bytes

    def _to_come(self, own: Needs) -> list[Needs]:
        """Return the needs of the calls that are expected, those not known yet as of this one."""
        count = max(0, self.calls - self._open_calls - 1)
        known = self._expected_needs(own)[self._open_calls + 1 :][:count]
        return [*known, *[own] * (count - len(known))]

    def _expected_needs(self, own: Needs) -> list[Needs]:
        """Return the needs of the calls as the last time, where they begin alike; else none."""
        order = self._orders.get(self._beside, [])
        begun = len(self._order)
        if order[:begun] != self._order:
            return []
        kinds = [reference() for reference in order]
        known = [self._needs.get(kind, {}) if kind is not None else {} for kind in kinds]
        return [next(iter(needs.values()), own) for needs in known]

    def beside(self, one: Specialisation, around: Surroundings, options: Options) -> Beside:
        """Return what calls there are beside one; with what they take gradients of another."""
        if self.calls == 1:
            return Beside(0, 0)
        to_come = max(0, self.calls - self._open_calls - 1)
        if self._open_calls >= self._expected(options):  # more than ever: nobody knows how many
            to_come = max(to_come, self._open_calls + 1)
        kept_bytes = self._needs_of(one, around, options).least_kept
        return Beside(self._open_calls, to_come * kept_bytes + self.waiting_bytes)

    def _join(self, open_calls: int) -> None:
        self._most_open = max(self._most_open, open_calls + 1)
        self.calls = max(self.calls, self._most_open)
        if self.calls >= 2 * self._told:  # a game may take hundreds: not of each of them
            self._told = self.calls
            announce(
                f"{self._name} is called {self.calls} times before a backward: each call has a "
                "part of the budget"
            )

    # -- dividing -----------------------------------------------------------------------------

    def _expected(self, options: Options) -> int:
        if options.in_flight is not None:
            return options.in_flight
        return max(self._seen.get(self._beside, (1,)))

    def _divide(self, one: Specialisation, alone: Surroundings, options: Options) -> None:
        own = self._needs_of(one, alone, options)
        known = self._expected_needs(own)[: self.calls]
        needs = [*known, *[own] * (self.calls - len(known))]
        self._division = self._room_bytes(one, alone, options), needs

    def _leave_room(self, one: Specialisation, alone: Surroundings, options: Options) -> None:
        """Divide for a few calls where they fit, but not where two do without that."""
        room_bytes = self._room_bytes(one, alone, options)
        new_bytes = self._account.new_gradient_bytes()
        peak_bytes, kept_bytes = most_needs(one, alone, new_bytes)
        if peak_bytes + kept_bytes <= room_bytes:
            return
        needs = rough_needs(one, alone, options, new_bytes)
        if needs is None:
            return
        calls = min(_MOST_LOOKED_FOR, _most_that_fit(room_bytes, needs))
        if calls > 1:
            self.calls, self._looked = calls, one
            self._division = room_bytes, [needs] * calls

    def _leave_rest(self, one: Specialisation, alone: Surroundings, options: Options) -> None:
        """Divide what is left beside calls that left room for nothing, for there may be more."""
        room_bytes = self._room_bytes(one, alone, options)
        needs = self._needs_of(one, alone, options)
        most = max(1, _MOST_LOOKED_FOR - self._open_calls)
        calls = min(most, _most_that_fit(room_bytes, needs))
        if calls > 0:
            self.calls = self._open_calls + calls
            self._division = room_bytes, [needs] * calls

    def _room_bytes(self, one: Specialisation, alone: Surroundings, options: Options) -> int:
        room_bytes = options.planned_bytes - _lasting_bytes(one, alone)
        room_bytes -= self._account.new_gradient_bytes() + self._gradients_of_another()
        return max(0, room_bytes)

    def _needs_of(self, one: Specialisation, alone: Surroundings, options: Options) -> Needs:
        known = self._needs.setdefault(one, {})
        if alone.gradients not in known:
            new_bytes = self._account.new_gradient_bytes()
            _, known[alone.gradients] = quick_needs(one, alone, options, new_bytes)
        return known[alone.gradients]

    def _gradients_of_another(self) -> int:
        """Return what another call's gradients take while autograd has yet to add them up."""
        return self._account.new_gradient_bytes() + self._account.gradient_bytes()


def _most_that_fit(room_bytes: int, needs: Needs) -> int:
    """Return how many calls fit if each keeps as little as it can."""
    return (room_bytes - needs.working_bytes) // max(1, needs.least_kept)


def _may_look(options: Options) -> bool:
    """Whether a first plan may be another one than the next: not where it was asked for."""
    searched = options.planner == DEFAULT and options.plan is None and options.ranks is None
    return searched and options.in_flight is None and not options.compile


def _lasting_bytes(one: Specialisation, alone: Surroundings) -> int:
    """Return what is held around a call but for its inputs, which each call has of its own."""
    graph = alone.around(one.captured)
    return graph.constant_bytes - graph.constants_bytes["inputs"]
