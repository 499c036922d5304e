"""A training with plain PyTorch and with tightfit, compared bit by bit."""

from __future__ import annotations

import contextlib
import statistics
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from tightfit.allocator.refusals import is_refusal
from tightfit.errors import (
    BadInput,
    CaptureError,
    InfeasibleBudget,
    NothingToTrain,
    TightfitError,
)
from tightfit.execution.attach import unfit_for_now
from tightfit.execution.guard import StepPeaks
from tightfit.planners.questions.minimum import MinimumBudget
from tightfit.progress import SILENT, Progress, shown
from tightfit.session.fitted import Fitted
from tightfit.session.handles import PlannedStep, fit_in_place
from tightfit.session.options import Options, make_options
from tightfit.session.parts.in_graphs import InGraphs
from tightfit.session.report import Report
from tightfit.studies.bits import largest_difference
from tightfit.studies.model import explain_error
from tightfit.studies.proof import Proof
from tightfit.studies.training import (
    TrainingRecord,
    differing_parts,
    planned_bytes_of,
    step_time,
    train,
)
from tightfit.studies.workload import Workload
from tightfit.zoo import Example

_UNLIMITED = 1 << 60
_MOST_ATTEMPTS = 4
_MOST_HALVINGS = 5
_MOST_TUNING_STEPS = 100
# for plain PyTorch that gives other bits in each run:
_REPEATS = 3
_LARGEST_NOISE = 1e-4
_TOLERATED_NOISES = 8.0


class Comparison:
    """A model trained with plain PyTorch once, and with tightfit at any number of budgets.

    Capture and costs are shared by all budgets.

    `example`: its model is fitted as by `tightfit.fit`, and the loss stays outside of the plan. A
    `tightfit.step` in the place of the model is compared as it is. `steps`: optimizer steps to
    compare, at least 2, as peaks are measured from the second on. `seed`: of every random number
    drawn in training. `**keywords`: of `tightfit.fit`. Raises `NothingToTrain` if plain PyTorch
    changes no parameter.
    """

    def __init__(
        self,
        example: Example,
        *,
        steps: int = 3,
        seed: int = 0,
        name: str = "",
        progress: Progress = SILENT,
        **keywords: Any,
    ) -> None:
        if steps < 2:
            raise BadInput("a proof needs at least 2 steps: peaks are measured from the second on")
        self.workload = Workload(example, seed)
        self.steps = steps
        self.name = name
        self.progress = progress
        self._keywords = keywords
        self._fitted: Fitted | None = None
        self._fit_again: Callable[[], None] | None = None
        self.eager = self._train_plainly()
        if not self.workload.has_trained():
            raise NothingToTrain(
                f"nothing is trained: in {steps} steps of plain PyTorch no parameter of "
                f"{name or type(self.workload.model).__name__} moves, and no gradient is other "
                "than zero: there is nothing to prove"
            )
        self._final = {key: tensor.clone() for key, tensor in self.workload.tensors().items()}

    def _train_plainly(self) -> TrainingRecord:
        try:
            return train(self.workload, self.steps)
        except TightfitError:
            raise
        except Exception as error:
            raise BadInput(
                f"{self.name or 'the model'} does not run with plain PyTorch: "
                f"{explain_error(error)}"
            ) from error

    def budget_of(self, ratio: float) -> int:
        """Return the constants plus a share of eager's activation peak."""
        activations = self.eager.peak_bytes - self.eager.constant_bytes
        return self.eager.constant_bytes + int(ratio * activations)

    def smallest_budget(self) -> MinimumBudget:
        """Return the smallest budget with a plan found; that plan is kept for later searches."""
        fitted = self.within(_UNLIMITED)
        self.workload.reset()
        return fitted.smallest_budget(*self.workload.model_inputs)

    def least_bytes(self) -> int:
        """Return the smallest budget in which the steps were run."""
        try:
            least = self.smallest_budget().found_bytes
        except CaptureError:
            return self._least_bytes_of_parts()
        return self._least_bytes_with_loss(least) if self.workload.loss_is_outside else least

    def _least_bytes_with_loss(self, least: int) -> int:
        """Return a budget with room for the tensors of a loss outside of the plan."""
        for _ in range(_MOST_ATTEMPTS):
            try:
                needed = self._train(self.within(least)).peak_bytes
            except InfeasibleBudget as error:
                needed = error.minimum_bytes or least
            if needed <= least:
                break
            least = needed
        return least

    def _least_bytes_of_parts(self) -> int:
        """Return a budget in which a model that allows no single graph has run its steps."""
        fitted = self.within(_UNLIMITED)
        most = self._train(fitted).peak_bytes
        if not isinstance(fitted.route, InGraphs):
            return self._least_bytes_between(fitted.report().constant_bytes, most)
        least = _least_bytes_in_parts(fitted)
        for _ in range(_MOST_ATTEMPTS):
            try:
                record = self._train(self.within(least))
            except InfeasibleBudget as error:
                needed = error.minimum_bytes or least
            else:
                needed = max(record.peak_bytes, _least_bytes_in_parts(fitted))
            if needed <= least:
                break
            least = needed
        return least

    def _least_bytes_between(self, least: int, most: int) -> int:
        """Return a budget in which a model of several graphs has run, by bisection."""
        for _ in range(_MOST_HALVINGS):
            try:
                held = self._train(self.within((least + most) // 2)).peak_bytes
            except Exception as error:  # no plan, or no room for tensors held between graphs
                if not isinstance(error, InfeasibleBudget) and not is_refusal(error):
                    raise
                least = (least + most) // 2
            else:
                most = min(most, max(held, (least + most) // 2))
        return most

    def at_least(self, budget_bytes: int, *, rounds: int = 5) -> Proof:
        """Train as `at` does, with a larger budget if a later step needs it.

        Later steps may run other layers than the first ones.
        """
        for _ in range(_MOST_ATTEMPTS):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    proof = self.at(budget_bytes, rounds=rounds)
                except InfeasibleBudget as error:
                    needed_bytes = error.minimum_bytes or 0
                    if needed_bytes <= budget_bytes:
                        raise
                else:
                    needed_bytes = proof.measured_peak_bytes
                    if needed_bytes <= budget_bytes:
                        break
            budget_bytes = needed_bytes
        else:
            return self.at(budget_bytes, rounds=rounds)
        for each in caught:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        return proof

    def at(self, budget_bytes: int, *, rounds: int = 5) -> Proof:
        """Train inside a budget, compare everything, and time `rounds` interleaved rounds.

        Raises `InfeasibleBudget` if no plan fits the budget. Raises `BadInput` if bits differ, and
        those of several runs of plain PyTorch differ by more than rounding, too.
        """
        fitted = self.within(budget_bytes)
        record = first = self._train(fitted)
        difference = largest_difference(self._final, self.workload.tensors())
        differing = differing_parts(self.eager, first)
        plan_of_first = self._report(fitted).plan
        ratios, timed = self._time(fitted, rounds)
        if self._report(fitted).plan is not plan_of_first:  # the plan with costs from real steps
            record = self._train(fitted)
            difference = max(difference, largest_difference(self._final, self.workload.tensors()))
            differing += tuple(d for d in differing_parts(self.eager, record) if d not in differing)
        for peaks, planned_bytes in timed:
            record.add_step(peaks, planned_bytes)
        report = self._report(fitted)
        tolerance = self._tolerance() if differing else None
        return Proof(
            status=report.status,
            model=self.name,
            device=self.workload.device.type,
            budget_bytes=budget_bytes,
            constant_bytes=record.constant_bytes,
            planned_peak_bytes=record.planned_bytes or report.planned_peak_bytes,
            measured_peak_bytes=max(first.peak_bytes, record.peak_bytes),
            measured_program_bytes=record.program_bytes,
            eager_peak_bytes=self.eager.peak_bytes,
            overhead=report.overhead,
            bound=report.bound,
            gap=report.gap,
            time_ratio=statistics.median(ratios) if ratios else None,
            time_ratios=tuple(ratios),
            bitwise=not differing,
            differing=differing,
            max_relative_difference=difference,
            tolerance=tolerance,
            losses=tuple(record.losses),
            seconds=first.first_s,
        )

    def _tolerance(self) -> float | None:
        """Return a multiple of the differences between runs of plain PyTorch; None without any.

        Sums by index on several threads, for example, are added up in another order each time.

        Raises `BadInput` if plain PyTorch differs from itself by more than rounding.
        """
        differing: tuple[str, ...] = ()
        noise = 0.0
        for _ in range(_REPEATS):
            differing = differing or differing_parts(self.eager, self._train_plainly())
            noise = max(noise, largest_difference(self._final, self.workload.tensors()))
        if noise > _LARGEST_NOISE:
            raise BadInput(
                f"{self.name or 'the model'} gives other bits each time it is trained with plain "
                f"PyTorch from the same state and seed (first: {differing[0]}). So there is "
                "nothing to compare with bit by bit. It draws a seed of its own (torch.seed()), "
                "or keeps results from step to step outside of parameters and buffers"
            )
        return _TOLERATED_NOISES * noise if differing else None

    def within(self, budget_bytes: int) -> Fitted:
        """Return what runs the model or the step, from now on inside a budget."""
        if self._fitted is None:
            self._fitted = self._fit(
                make_options(
                    budget_bytes,
                    optimizer=self.workload.optimizer,
                    on_exceed="warn",
                    progress=self.progress,
                    stops_on_interrupt=False,
                    **self._keywords,
                )
            )
        self._fitted.change_budget(budget_bytes)
        return self._fitted

    def _fit(self, options: Options) -> Fitted:
        if self.workload.step is not None:
            fitted = Fitted.as_a_whole(self.workload.step, options)
        else:
            fitted = fit_in_place(self.workload.model, options)
            self._fit_again = unfit_for_now(self.workload.model)
        self.workload.make_new_batch()
        return fitted

    @contextlib.contextmanager
    def fitted(self) -> Iterator[None]:
        """Have the workload run within its budget in this context, else as plain PyTorch."""
        assert self._fitted is not None
        if self._fit_again is None:
            with self.workload.running(PlannedStep(self._fitted)):
                yield
            return
        self._fit_again()
        try:
            yield
        finally:
            self._fit_again = unfit_for_now(self.workload.model)

    def _train(self, fitted: Fitted) -> TrainingRecord:
        with self.fitted():
            return train(self.workload, self.steps, fitted)

    def _report(self, fitted: Fitted) -> Report:
        fitted.settle()
        return fitted.report()

    def _time(self, fitted: Fitted, rounds: int) -> tuple[list[float], list[tuple[StepPeaks, int]]]:
        """Return time ratios of planned to plain steps, and measured and planned peaks.

        Steps are interleaved, their order alternates. Costs and plan are final before the first.
        """
        ratios: list[float] = []
        peaks: list[tuple[StepPeaks, int]] = []
        if rounds == 0:
            return ratios, peaks
        with shown(self.progress, "timing steps", rounds):
            for _ in range(_MOST_TUNING_STEPS):  # endless where data decide what each step runs
                if fitted.is_tuning:
                    self._planned_time(fitted, peaks)
            peaks.clear()  # of earlier plans
            self._planned_time(fitted, peaks)
            for index in range(rounds):
                if index % 2:
                    plain = step_time(self.workload, self.workload.loss_of)
                    ours = self._planned_time(fitted, peaks)
                else:
                    ours = self._planned_time(fitted, peaks)
                    plain = step_time(self.workload, self.workload.loss_of)
                ratios.append(ours / plain)
                self.progress.update(index + 1)
        return ratios, peaks

    def _planned_time(self, fitted: Fitted, peaks: list[tuple[StepPeaks, int]]) -> float:
        with self.fitted():
            seconds = step_time(self.workload, self.workload.loss_of)
        step_peaks = fitted.close_step()
        if step_peaks is not None:
            peaks.append((step_peaks, planned_bytes_of(fitted)))
        return seconds


def _least_bytes_in_parts(fitted: Fitted) -> int:
    """Return the bytes of a step like the last one with the least plan of every part."""
    route = fitted.route
    assert isinstance(route, InGraphs)  # else the step has raised an error
    route.close_step()
    return route.steps.least_bytes()
