"""Chooses the plan that a call of a whole step runs, for what lies around it now."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from tightfit.errors import InfeasibleBudget
from tightfit.planners.questions.minimum import MinimumBudget
from tightfit.session.anywhere import Anywhere
from tightfit.session.callee import Callee
from tightfit.session.memory.account import Account
from tightfit.session.memory.budget import Budget, Share
from tightfit.session.memory.surroundings import Surroundings
from tightfit.session.options import Options
from tightfit.session.whole.advice import advised
from tightfit.session.whole.captures import Captures
from tightfit.session.whole.comparing import Comparing
from tightfit.session.whole.learning import Watch
from tightfit.session.whole.planning import NeedsComparing, planned_for, smallest_budget
from tightfit.session.whole.shares.around import around_step
from tightfit.session.whole.shares.company import begin_in_company, declare, is_new_in_company
from tightfit.session.whole.shares.flight import Flight
from tightfit.session.whole.specialisation import Planned, Specialisation

__all__ = ["Plans"]


class Plans:
    """The plans that calls of a callee run: what is at hand is chosen anew for each call.

    Parameters
    ----------
    callee : Callee
        What is run.
    captures : Captures
        What was captured of it.
    account : Account
        What it holds between steps.
    addresses : Anywhere
        Where its steps lie in memory.
    watch : Watch
        Measures its steps.

    Attributes
    ----------
    flight : Flight
        Calls that await their backward at once.
    more_bytes : int
        Held now beyond what was held when the last plan was made.
    """

    def __init__(
        self,
        callee: Callee,
        captures: Captures,
        account: Account,
        addresses: Anywhere,
        watch: Watch,
    ) -> None:
        self.flight = Flight(callee.name, account)
        self.more_bytes = 0
        self._name = callee.name
        self._captures = captures
        self._account = account
        self._watch = watch
        self._comparing = Comparing(account, addresses)

    def chosen(
        self,
        one: Specialisation,
        inputs: list[Any],
        options: Options,
        waiting: Sequence[object],
        *,
        waits: bool = False,
    ) -> Planned:
        """Return the plan of a call; where nothing fits, without the garbage that lies about.

        Parameters
        ----------
        one : Specialisation
            The step.
        inputs : list
            What its placeholders are.
        options : Options
            The user's.
        waiting : sequence
            Earlier calls that await their backward.
        waits : bool
            Whether to search now and not in the background: nobody trains yet.

        Raises
        ------
        InfeasibleBudget
            If no plan fits.
        """
        try:
            return self._chosen(one, inputs, options, waiting, waits=waits)
        except InfeasibleBudget:
            if not self._account.collect_garbage():
                raise
        return self._chosen(one, inputs, options, waiting, waits=waits)

    def smallest_budget(
        self, one: Specialisation, inputs: list[Any], options: Options
    ) -> MinimumBudget:
        """Find the smallest budget with a plan for a step; the plan is kept in mind."""
        self._comparing.end(one, options)
        return smallest_budget(one, self._around(one, inputs, options, Share(0)), options)

    def declare_needs(
        self, one: Specialisation, inputs: list[Any], options: Options, budget: Budget
    ) -> MinimumBudget:
        """Tell a budget that is to be shared what a step needs; return the least."""
        self._comparing.end(one, options)
        alone = self._around(one, inputs, options, Share(0))
        return declare(one, alone, self._account, options, budget)

    def looking_bytes(self, options: Options) -> int:
        """Return what finding out about operators may hold now."""
        return self._comparing.room_bytes(options)

    def _chosen(
        self,
        one: Specialisation,
        inputs: list[Any],
        options: Options,
        waiting: Sequence[object],
        *,
        waits: bool,
    ) -> Planned:
        self._comparing.go_on(one, options, waiting)
        one.use_step_costs(options)
        alone = partial(self._around, one, inputs, options, Share(0))
        begin_in_company(one, alone, self._account, options)
        looks = not (waits or one.plans or is_new_in_company(one, options))
        self.flight.begin(one, alone, options, len(waiting), looks=looks)
        known = tuple(one.plans.values())
        if options.compile:
            self._account.let_go()  # what a compiled plan holds shows when it runs, and is learned
        try:
            around, planned = self._fitting(one, inputs, options, waits=waits)
        except NeedsComparing:
            self._comparing.end(one, options)
            self.flight.forget_needs(one)
            self.flight.begin(one, alone, options, len(waiting), looks=looks)
            around, planned = self._fitting(one, inputs, options, waits=waits)
        self.more_bytes = one.held_more(planned, around)
        if all(planned is not each for each in known):
            self._watch.leave_out_garbage()  # making a plan makes Python collect it
            if options.compile:
                self._watch.restart()  # what compiling and trying took belongs to no step
        return planned

    def _fitting(
        self, one: Specialisation, inputs: list[Any], options: Options, *, waits: bool
    ) -> tuple[Surroundings, Planned]:
        """Return what lies around the step and its plan; leave room to look only if there is."""
        around = self._around(one, inputs, options)
        try:
            planned = planned_for(
                one,
                around,
                inputs,
                options,
                self._name,
                self._captures.other_plans,
                waits=waits,
                least=is_new_in_company(one, options),
                once=self.flight.looks,
            )
        except InfeasibleBudget as error:
            if self.flight.looks:
                self.flight.look_no_more()
                return self._fitting(one, inputs, options, waits=waits)
            self._watch.abandon()
            beside = self.flight.beside(one, around, options)
            raise advised(error, one, around, self._account, options, beside) from None
        return around, planned

    def _around(
        self,
        one: Specialisation,
        inputs: list[Any],
        options: Options,
        share: Share | None = None,
    ) -> Surroundings:
        """Return what lies around the step now; its share of the budget unless that is given."""
        return around_step(one, inputs, self._account, options, self.flight, share)
