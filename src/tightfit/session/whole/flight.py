"""Several calls of one callable that await their backward at once: what each may keep."""

from __future__ import annotations

import weakref

from tightfit.plan.plan import Gradients
from tightfit.session.memory.account import Account
from tightfit.session.memory.budget import Needs, Share, divided
from tightfit.session.memory.surroundings import Surroundings
from tightfit.session.options import Options
from tightfit.session.whole.planning import quick_needs
from tightfit.session.whole.specialisation import Specialisation

__all__ = ["Flight"]


class Flight:
    """Calls of a callable that await their backward at once, each of them within one budget.

    Each works beside what the others keep, in whichever order their backwards come, and beside
    the gradients that another backward has made. What the first call finds free is divided so
    that what is left beside all that is kept suffices for the largest working set
    (`memory.budget.divided`); what a call may keep then stays the same until none is open.

    Parameters
    ----------
    account : Account
        What the callable holds.
    """

    def __init__(self, account: Account) -> None:
        self._account = account
        self._kept_bytes = 0
        self._needs: weakref.WeakKeyDictionary[Specialisation, dict[Gradients, Needs]] = (
            weakref.WeakKeyDictionary()
        )

    def begin(self, one: Specialisation, alone: Surroundings, options: Options) -> None:
        """Divide what the first of several calls finds free.

        Parameters
        ----------
        one : Specialisation
            The step.
        alone : Surroundings
            What lies around it, whatever the budget.
        """
        needs = self._needs_of(one, alone, options)
        room_bytes = options.usable_bytes - _lasting_bytes(one, alone)
        room_bytes -= self._account.new_gradient_bytes() + self._gradients_of_another()
        share = divided(max(0, room_bytes), [needs] * options.in_flight, needs)
        self._kept_bytes = share.peak_bytes - share.others_bytes

    def share(
        self, one: Specialisation, alone: Surroundings, options: Options, open_calls: int
    ) -> Share:
        """Return the share of one call: what is left beside what calls to come may keep.

        Parameters
        ----------
        open_calls : int
            Earlier ones that await their backward; what they keep is held, too.
        """
        to_come = max(0, options.in_flight - open_calls - 1)
        peak_bytes = options.usable_bytes - to_come * self._kept_bytes
        peak_bytes -= self._gradients_of_another()
        others_bytes = peak_bytes - _lasting_bytes(one, alone) - self._kept_bytes
        return Share(peak_bytes, max(0, others_bytes))

    def least_beside(
        self, one: Specialisation, around: Surroundings, options: Options, open_calls: int
    ) -> int:
        """Return what calls to come take at least beside one, gradients of another included."""
        if options.in_flight == 1:
            return 0
        to_come = max(0, options.in_flight - open_calls - 1)
        kept_bytes = self._needs_of(one, around, options).least_kept
        return to_come * kept_bytes + self._gradients_of_another()

    def _needs_of(self, one: Specialisation, alone: Surroundings, options: Options) -> Needs:
        known = self._needs.setdefault(one, {})
        if alone.gradients not in known:
            new_bytes = self._account.new_gradient_bytes()
            _, known[alone.gradients] = quick_needs(one, alone, options, new_bytes)
        return known[alone.gradients]

    def _gradients_of_another(self) -> int:
        """Return what another call's gradients take while autograd has yet to add them up."""
        return self._account.new_gradient_bytes() + self._account.gradient_bytes()


def _lasting_bytes(one: Specialisation, alone: Surroundings) -> int:
    """Return what is held around a call but for its inputs, which each call has of its own."""
    graph = alone.around(one.captured)
    return graph.constant_bytes - graph.constants_bytes["inputs"]
