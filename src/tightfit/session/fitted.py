"""A fitted callable: by which route it runs, within which budget, with which ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tightfit.capture.calls.signature import shape_of_call
from tightfit.capture.calls.structure import Arguments
from tightfit.capture.opaque.needs import NoRoomToMeasure
from tightfit.errors import (
    BadInput,
    CaptureError,
    InfeasibleBudget,
    TightfitError,
)
from tightfit.execution.guard import Guard, StepPeaks
from tightfit.execution.runtime import Run
from tightfit.planners.questions.minimum import MinimumBudget
from tightfit.session.addresses import addresses_for
from tightfit.session.callee import Callee
from tightfit.session.copies import Copies
from tightfit.session.default_addresses import DefaultAddresses, PlanRejected
from tightfit.session.graphs import GraphSteps
from tightfit.session.memory.account import Account
from tightfit.session.memory.budget import Budget
from tightfit.session.memory.limit import Limit, refuses
from tightfit.session.new_calls import NewCalls
from tightfit.session.options import Options, incompatible, largest_first, with_ranks
from tightfit.session.processes import Replicas
from tightfit.session.refusals import second_forward, with_way_out
from tightfit.session.report import Report
from tightfit.session.whole.specialisation import Planned, Specialisation
from tightfit.torch_private import tools


class Route(Protocol):
    """How a fitted callable runs: as one graph, part by part, or graph by graph."""

    @property
    def guard(self) -> Guard:
        """What measures the steps, from the first on."""

    @property
    def waiting(self) -> list[Run]:
        """Calls that await their backward."""

    @property
    def is_used(self) -> bool:
        """Whether a planned call has been run, or is to be run."""

    def __call__(self, given: Arguments) -> Any:
        """Run one forward."""

    def outside_of_plans(self) -> bool:
        """Whether a call must run without a plan, because of the code around it; note that."""

    def prepare(self, given: Arguments) -> None:
        """Plan for the given inputs without running anything."""

    def settle(self) -> None:
        """Finish work that a report depends on."""

    def report(self) -> Report:
        """Return the figures of the plans, and bytes held by the last complete step."""

    def close_step(self) -> StepPeaks | None:
        """End the measured window of the last step now; return its peaks."""

    def needed_bytes(self) -> int:
        """Return the least budget for steps like the last; 0: nothing is known of any."""

    def change_options(self, options: Options) -> None:
        """Plan the next step with other options; captured steps stay."""


class Fitted:
    """A callable that trains inside a budget.

    `options`, `route`: those of now; ranks may have joined, and the budget may have changed.
    `copies`: state in common with the model that this is a copy of.
    """

    def __init__(
        self,
        callee: Callee,
        options: Options,
        account: Account,
        route: Route,
        addresses: DefaultAddresses,
        *,
        copies: Copies | None = None,
    ) -> None:
        self.callee = callee
        self.options = options
        self.account = account
        self.route = route
        self._whole = route if isinstance(route, GraphSteps) else None
        self._at_leaving: list[Callable[[], None]] = [addresses.leave]
        self._running_in: int | None = None
        needs = weakref.WeakMethod(self._needed_bytes)
        self._limit = Limit(callee.name, account, needs, is_copy=copies is not None)
        self._addresses = addresses
        self._new_calls = NewCalls()
        self._copies = copies  # of which it has a part once it trains
        if copies is None:
            self._join_budget()

    @classmethod
    def as_a_whole(cls, callee: Callee, options: Options, copies: Copies | None = None) -> Fitted:
        """Return a fitted callable that runs as one graph where that can be captured."""
        tally = copies.tally if copies is not None else options.known_tally(callee.modules)
        account = Account(callee.modules, options.optimizer, tally)
        account.optimizers.step_in_backward(options.steps)
        addresses = addresses_for(callee.name, account, options)
        route = GraphSteps(callee, options, account, addresses)
        return cls(callee, options, account, route, addresses, copies=copies)

    @property
    def name(self) -> str:
        return self.callee.name

    @property
    def on_exceed(self) -> Literal["raise", "warn"]:
        return self.options.on_exceed

    # -- calling ------------------------------------------------------------------------------

    @property
    def is_used(self) -> bool:
        return self.route.is_used

    @property
    def has_limit(self) -> bool:
        return refuses(self.account)

    @property
    def waiting(self) -> list[Run]:
        return self.route.waiting

    def is_of(self, module: nn.Module) -> bool:
        return self.callee.root is module

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one planned forward; the plain callable if no backward can come."""
        if self._running_in == threading.get_ident():  # a forward over a tree calls itself
            return self.callee.function(*args, **kwargs)
        self._running_in = threading.get_ident()
        try:
            with self._limit:
                return self._run(args, kwargs)
        except TightfitError as error:
            raise with_way_out(error, self.account.device) from error.__cause__
        finally:
            self._running_in = None

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = Arguments.of(args, kwargs)
        if tools.is_exported() or not self.callee.trains(given):
            self._addresses.end_step()
            return self._run_without_backward(given)
        self.account.loop_peaks.call_begins(given.leaves)
        if self.route.outside_of_plans():
            return self._run_outside(given)
        if self._whole is not None and self._may_run_eagerly(given):
            self._new_calls.note_plain(given)
            self._whole.outside.note_new_calls()
            return self._run_outside(given)
        self._refuse_second_forward()
        if (wrapper := tools.active_wrapper()) is not None:
            self.join_replicas(wrapper)
        self._resolve_budget()
        self.account.optimizers.find()
        limits = self._limits()
        is_used = self.is_used
        if not is_used:
            self._limit.refuse_below_parameters(self.options.planned_bytes)
        self._limit.begin(*limits, is_looking=not is_used)
        self._addresses.end_step()
        if self.route is not self._whole or not self._addresses.plans_first(self.options):
            self._take_options(self._addresses.measure(given.leaves, self.options))
        if self.route is not self._whole:  # whole steps begin when their plan is known
            self._addresses.begin_step(shape_of_call(given.leaves, given.spec), self)
        while True:
            try:
                return self._run_noting_new(given)
            except PlanRejected as other:
                self._take_options(other.options)
            except InfeasibleBudget as error:
                self._take_options(self._addresses.leaving_less(self.options, error))

    def _refuse_second_forward(self) -> None:
        allowed = self.options.in_flight
        if allowed is None and self.is_in_parts:
            allowed = 1
        if allowed is not None and (waiting := len(self.waiting)) >= allowed:
            raise second_forward(self.name, waiting)

    def _run_without_backward(self, given: Arguments) -> Any:
        if tools.is_exported():
            return self.callee.function(*given.args, **given.kwargs)
        limits = self._limits()
        open_calls = self.options.shared.open_members() if self.options.shared else self.waiting
        with self._limit.without_backward(*limits, goes_on=bool(open_calls)):
            return self.callee.function(*given.args, **given.kwargs)

    def _run_outside(self, given: Arguments) -> Any:
        """Run the callable without a plan, within the limit; a backward may follow."""
        self._resolve_budget()
        self._addresses.end_step()
        with self._limit.outside(*self._limits()):
            return self.callee.function(*given.args, **given.kwargs)

    def _may_run_eagerly(self, given: Arguments) -> bool:
        """Whether a call runs as plain PyTorch, because its plan would hardly be used again."""
        if not self._new_calls.are_many or self.waiting or self.options.needs_plans:
            return False
        return self._new_calls.runs_eagerly(given, self._fits_eagerly)

    def _fits_eagerly(self, times: float) -> bool:
        """Whether plain PyTorch has room for a multiple of the bytes of the last planned step."""
        assert self._whole is not None
        if not refuses(self.account):
            return False
        self.close_step()
        plain_bytes = self._whole.plain_bytes()
        if plain_bytes is None or not self.guard.steps:
            return False
        most_bytes = max(self.guard.steps[-1].peak_bytes, plain_bytes)
        return most_bytes * times <= self.options.planned_bytes

    def _run_noting_new(self, given: Arguments) -> Any:
        """Run a call; note whether Dynamo followed Python for it."""
        if self._whole is None:
            return self._run_on_route(given)
        before = self._whole.times_followed
        output = self._run_on_route(given)
        self._new_calls.note_planned(given, is_new=self._whole.times_followed > before)
        return output

    def _run_on_route(self, given: Arguments) -> Any:
        if self.route is not self._whole:
            return self.route(given)
        if self._addresses.plans_first(self.options):
            # with no single graph, or no room to measure, it is planned while it runs, or never
            with contextlib.suppress(CaptureError, NoRoomToMeasure):
                self._whole.prepare(given, quickly=True)
            self._take_options(self._addresses.measure(given.leaves, self.options))
        try:
            return self.route(given)
        finally:
            self._switch_to_graphs()

    def _switch_to_graphs(self) -> None:
        """Plan whole steps of several graphs from now on, if the call had several."""
        if self._whole is not None and self._whole.in_graphs is not None:
            self.route = self._whole.in_graphs

    # -- planning before training -------------------------------------------------------------

    def prepare(self, given: Arguments) -> Report:
        """Capture, price and plan for the given inputs without running anything.

        Raises `CaptureError` if it cannot be captured as a whole; says how it is trained instead.
        """
        self._resolve_budget()
        try:
            self.route.prepare(given)
        except CaptureError as error:
            raise with_way_out(error, self.account.device) from error.__cause__
        self.settle()
        return self.report()

    # -- reporting ----------------------------------------------------------------------------

    def settle(self) -> None:
        self.route.settle()

    def report(self) -> Report:
        """Return the figures of the current plan and bytes held by the last step.

        Raises `BadInput` if nothing has been planned yet.
        """
        return self._addresses.added_to(self.route.report())

    def close_step(self) -> StepPeaks | None:
        return self.route.close_step()

    @property
    def guard(self) -> Guard:
        return self.route.guard

    @property
    def is_in_parts(self) -> bool:
        return self.route is not self._whole

    @property
    def specialisations(self) -> list[Specialisation]:
        """Steps captured of it as a whole so far."""
        return list(self._whole.captures) if self._whole is not None else []

    @property
    def last(self) -> Planned | None:
        """The plan of the last step that was planned as a whole."""
        return self._whole.last if self._whole is not None else None

    @property
    def is_tuning(self) -> bool:
        """Whether steps teach something before the final plan is made: costs, alternatives."""
        return self._whole is not None and self._whole.is_tuning

    # -- budgets and ranks --------------------------------------------------------------------

    def change_options(self, options: Options) -> None:
        self.close_step()
        self._take_options(options)
        self._join_budget()

    def change_budget(self, budget_bytes: int) -> None:
        """Plan the next step within another budget, and measure again."""
        self.change_options(dataclasses.replace(self.options, budget_bytes=budget_bytes))
        if self.route is self._whole:
            self._whole.measure_again()

    def smallest_budget(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MinimumBudget:
        """Find the smallest budget with a plan for these inputs; remember the plan."""
        assert self._whole is not None  # sharded models are not asked
        return self._whole.smallest_budget(Arguments.of(args, kwargs))

    def _needed_bytes(self) -> int:
        return self.route.needed_bytes()

    def join_replicas(self, wrapper: DistributedDataParallel) -> None:
        """Plan together with the other ranks of a DistributedDataParallel around the module."""
        known = self.account.replicas
        if self.options.steps is not None:
            raise BadInput(
                "update_in_backward=True does not go with DistributedDataParallel, which has "
                "gradients summed up over processes before a step: leave one of them out"
            )
        if known is not None and known.is_of(wrapper):
            return
        if self._whole is None:
            raise BadInput("a model with sharded parts is not wrapped in DistributedDataParallel")
        if self.options.offload is not None:
            raise incompatible("offload=", "DistributedDataParallel yet")
        self.close_step()
        replicas = Replicas(wrapper)
        self.account.join(replicas)
        self._take_options(with_ranks(self.options, replicas.ranks))
        self._whole.capture_again()
        self.route = self._whole

    def _resolve_budget(self) -> None:
        """Resolve the budget before training; a copy shares that of its original."""
        before = self.options
        self._take_options(before.resolved(self.account.device))
        if self._copies is not None:
            copies, self._copies = self._copies, None
            self.share(self.options.shared or copies.budget(self.options.limit_bytes))
        elif self.options is not before:
            self._join_budget()
        self.account.expect_training(True)

    def share(self, budget: Budget) -> None:
        self._take_options(dataclasses.replace(self.options, shared=budget))
        self._join_budget()

    def _take_options(self, options: Options) -> None:
        if options is self.options:
            return
        self.options = options
        self.route.change_options(options)
        if self._whole is not None:
            self._whole.change_options(options)

    def _limits(self) -> tuple[int | None, list[Account]]:
        """Return the limit to enforce, and the accounts that share it."""
        return self.options.enforced_bytes, self.options.others_in_budget(self.account)

    def _join_budget(self) -> None:
        if self.options.shared is not None:
            self.options.shared.join(self.account, self)
        self._limit.follow(*self._limits())

    # -- leaving ------------------------------------------------------------------------------

    def at_leaving(self, callback: Callable[[], None]) -> None:
        """Register a callback for when the model is unfitted, or fitted again."""
        self._at_leaving.append(callback)

    def leave(self) -> None:
        """Leave a shared budget, lift the limit, and run the registered callbacks."""
        if self.options.shared is not None:
            self.options.shared.leave(self.account)
        self.account.set_limit(None)
        for callback in self._at_leaving:
            callback()
        self._at_leaving.clear()


def prepare_all(fitted: Fitted, shapes: Iterable[Any]) -> None:
    """Plan for example inputs, the largest first: it is the first not to fit.

    A callable that cannot be planned leaves a shared budget.
    """
    try:
        for given in largest_first(shapes, fitted.callee.modules):
            with torch.enable_grad():
                fitted.prepare(given)
    except BaseException:
        fitted.leave()
        raise
