"""The same training with plain PyTorch and with tightfit, compared bit by bit."""

from __future__ import annotations

import contextlib
import statistics
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

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
from tightfit.studies.model import explain_error
from tightfit.studies.subject import (
    Subject,
    TrainingRecord,
    differing_parts,
    largest_difference,
    planned_bytes_of,
    step_time,
    train,
)
from tightfit.zoo import Example

_UNLIMITED = 1 << 60


_MOST_ATTEMPTS = 4
_MOST_HALVINGS = 5
_REPEATS = 3
_MOST_TUNING = 100
_LARGEST_NOISE = 1e-4
_TOLERATED = 8.0


class Comparison:
    """A model trained with plain PyTorch once, and with tightfit at any number of budgets.

    Capture and costs are shared by all budgets.

    `example`: ``model``, ``loss(output, target)`` or None, ``args`` (tuple or dict), ``target``.
    The model is fitted as `tightfit.fit` does, and the loss stays outside of the plan; in its place
    there may be a `tightfit.step`, which is then proven. `steps`: optimizer steps to compare, at
    least 2: peaks are measured from the second on. `seed`: of every random number drawn in
    training. `**keywords`: as `tightfit.fit` takes them. Raises `NothingToTrain` if plain PyTorch
    trains nothing: no parameter moves.
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
        self.subject = Subject(example, seed)
        self.steps = steps
        self.name = name
        self.progress = progress
        self._keywords = keywords
        self._fitted: Fitted | None = None
        self._fit_again: Callable[[], None] | None = None
        self.eager = self._train_plainly()
        if not self.subject.has_trained():
            raise NothingToTrain(
                f"nothing is trained: in {steps} steps of plain PyTorch no parameter of "
                f"{name or type(self.subject.model).__name__} moves, and no gradient is other than "
                "zero: there is nothing to prove"
            )
        self._final = {key: tensor.clone() for key, tensor in self.subject.tensors().items()}

    def _train_plainly(self) -> TrainingRecord:
        try:
            return train(self.subject, self.subject.loss_of, self.steps)
        except TightfitError:
            raise
        except Exception as error:
            raise BadInput(
                f"{self.name or 'the model'} does not run with plain PyTorch: "
                f"{explain_error(error)}"
            ) from error

    def budget_of(self, ratio: float) -> int:
        """Return the budget that is a share of eager's activation peak on top of the constants."""
        activations = self.eager.peak_bytes - self.eager.constant_bytes
        return self.eager.constant_bytes + int(ratio * activations)

    def smallest_budget(self) -> MinimumBudget:
        """Return the smallest budget with a plan found; its plan is used if no better is found."""
        fitted = self.within(_UNLIMITED)
        self.subject.reset()
        return fitted.smallest_budget(*self.subject.given)

    def least_bytes(self) -> int:
        """Return the smallest budget in which the steps were run."""
        try:
            least = self.smallest_budget().found_bytes
        except CaptureError:
            return self._least_bytes_of_parts()
        return self._least_bytes_with_loss(least) if self.subject.loss_is_outside else least

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
                trace = self._train(self.within(least))
            except InfeasibleBudget as error:
                needed = error.minimum_bytes or least
            else:
                needed = max(trace.peak_bytes, _least_bytes_in_parts(fitted))
            if needed <= least:
                break
            least = needed
        return least

    def _least_bytes_between(self, least: int, most: int) -> int:
        """Return a budget in which a model of several graphs has run, by halving the bracket."""
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
        """Train as `at` does, with more where steps that follow need it.

        They may run other layers than those before.
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

        Raises `InfeasibleBudget` if there is no plan within the budget. Raises `BadInput` if bits
        differ, and results do by more than rounding when plain PyTorch is run again.
        """
        fitted = self.within(budget_bytes)
        trace = first = self._train(fitted)
        difference = largest_difference(self._final, self.subject.tensors())
        differing = differing_parts(self.eager, first)
        plan_of_first = self._report(fitted).plan
        ratios, timed = self._time(fitted, rounds)
        if self._report(fitted).plan is not plan_of_first:  # the plan with costs from real steps
            trace = self._train(fitted)
            difference = max(difference, largest_difference(self._final, self.subject.tensors()))
            differing += tuple(d for d in differing_parts(self.eager, trace) if d not in differing)
        for peaks, planned_bytes in timed:
            trace.note(peaks, planned_bytes)
        report = self._report(fitted)
        tolerance = self._tolerance() if differing else None
        return Proof(
            status=report.status,
            model=self.name,
            device=self.subject.device.type,
            budget_bytes=budget_bytes,
            constant_bytes=trace.constant_bytes,
            planned_peak_bytes=trace.planned_bytes or report.planned_peak_bytes,
            measured_peak_bytes=max(first.peak_bytes, trace.peak_bytes),
            measured_program_bytes=trace.program_bytes,
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
            losses=tuple(trace.losses),
            seconds=first.first_s,
        )

    def _tolerance(self) -> float | None:
        """Return the difference below which results count as equal; None to compare bits.

        Sums by index on several threads, for example, are added up in another order each time:
        the differences between several runs of plain PyTorch are then the measure.

        Raises `BadInput` if they differ by more than rounding does.
        """
        differing: tuple[str, ...] = ()
        noise = 0.0
        for _ in range(_REPEATS):
            differing = differing or differing_parts(self.eager, self._train_plainly())
            noise = max(noise, largest_difference(self._final, self.subject.tensors()))
        if noise > _LARGEST_NOISE:
            raise BadInput(
                f"{self.name or 'the model'} gives other bits each time it is trained with plain "
                f"PyTorch from the same state and seed (first: {differing[0]}). So there is "
                "nothing to compare with bit by bit. It draws a seed of its own (torch.seed()), "
                "or keeps results from step to step outside of parameters and buffers"
            )
        return _TOLERATED * noise if differing else None

    def within(self, budget_bytes: int) -> Fitted:
        """Return a callable that runs the model or the step, from now on inside a budget."""
        if self._fitted is None:
            self._fitted = self._fit(
                make_options(
                    budget_bytes,
                    optimizer=self.subject.optimizer,
                    on_exceed="warn",
                    progress=self.progress,
                    stops_on_interrupt=False,
                    **self._keywords,
                )
            )
        self._fitted.change_budget(budget_bytes)
        return self._fitted

    def _fit(self, options: Options) -> Fitted:
        if self.subject.step is not None:
            fitted = Fitted.as_a_whole(self.subject.step, options)
        else:
            fitted = fit_in_place(self.subject.model, options)
            self._fit_again = unfit_for_now(self.subject.model)
        self.subject.make_new_batch()
        return fitted

    @contextlib.contextmanager
    def fitted(self) -> Iterator[None]:
        """Compute the subject's loss within the budget meanwhile: as plain PyTorch else."""
        assert self._fitted is not None
        if self._fit_again is None:
            with self.subject.running(PlannedStep(self._fitted)):
                yield
            return
        self._fit_again()
        try:
            yield
        finally:
            self._fit_again = unfit_for_now(self.subject.model)

    def _train(self, fitted: Fitted) -> TrainingRecord:
        with self.fitted():
            return train(self.subject, self.subject.loss_of, self.steps, fitted)

    def _report(self, fitted: Fitted) -> Report:
        fitted.settle()
        return fitted.report()

    def _time(self, fitted: Fitted, rounds: int) -> tuple[list[float], list[tuple[StepPeaks, int]]]:
        """Return the time ratio of planned to plain steps; of the planned ones peaks and plans.

        Steps are interleaved, their order alternates; costs and plan are final by then.
        """
        ratios: list[float] = []
        peaks: list[tuple[StepPeaks, int]] = []
        if rounds == 0:
            return ratios, peaks
        with shown(self.progress, "timing steps", rounds):
            for _ in range(_MOST_TUNING):  # where data decide in each step, it never ends
                if fitted.is_tuning:
                    self._planned_time(fitted, peaks)
            peaks.clear()  # of the plan before
            self._planned_time(fitted, peaks)
            for index in range(rounds):
                if index % 2:
                    plain = step_time(self.subject, self.subject.loss_of)
                    ours = self._planned_time(fitted, peaks)
                else:
                    ours = self._planned_time(fitted, peaks)
                    plain = step_time(self.subject, self.subject.loss_of)
                ratios.append(ours / plain)
                self.progress.update(index + 1)
        return ratios, peaks

    def _planned_time(self, fitted: Fitted, peaks: list[tuple[StepPeaks, int]]) -> float:
        with self.fitted():
            seconds = step_time(self.subject, self.subject.loss_of)
        step_peaks = fitted.close_step()
        if step_peaks is not None:
            peaks.append((step_peaks, planned_bytes_of(fitted)))
        return seconds


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a proof; sizes in bytes with constants, times as ratios to eager.

    Parameters
    ----------
    status : str
        ``"optimal"`` or ``"feasible"``.
    budget_bytes, constant_bytes, measured_peak_bytes, eager_peak_bytes : int
        Peaks of whole steps from the second on.
    planned_peak_bytes, measured_program_bytes : int
        Peak of the planned part, the optimizer step left out, in the step where that was highest:
        predicted and measured. A model planned part by part may leave parts out of a step; its
        prediction is for those that ran.
    overhead, bound, gap : float
        Predicted, as fractions.
    time_ratio : float or None
        Median over interleaved rounds of the step's time to eager's (CPU time on a CPU).
    time_ratios : tuple of float
        The rounds.
    bitwise : bool
        Whether every loss, gradient, buffer and parameter had the same bits.
    differing : tuple of str
        The run that did not succeed.
    max_relative_difference : float
        Over the final gradients, buffers and parameters.
    losses : tuple of float
        Of the planned steps.
    minimum_budget_bytes : int or None
        The smallest budget with a plan found, if that was asked for.
    tolerance : float or None
        Where plain PyTorch itself gives other bits each time, the relative difference within which
        results count as equal. It is a small multiple of the difference between its own runs.
    seconds : float
        Of the first planned call: capture, costs, plan, lowering, and the step itself.
    """

    status: str
    model: str
    device: str
    budget_bytes: int
    constant_bytes: int
    planned_peak_bytes: int
    measured_peak_bytes: int
    measured_program_bytes: int
    eager_peak_bytes: int
    overhead: float
    bound: float
    gap: float
    time_ratio: float | None
    time_ratios: tuple[float, ...]
    bitwise: bool
    differing: tuple[str, ...]
    max_relative_difference: float
    losses: tuple[float, ...]
    seconds: float
    minimum_budget_bytes: int | None = None
    tolerance: float | None = None

    @property
    def succeeded(self) -> bool:
        """Whether everything was shown: the budget held and all bits are the same.

        Where plain PyTorch does not repeat its own bits, results within `tolerance` will do.
        """
        return self.holds and (self.bitwise or self.is_within_tolerance)

    @property
    def is_within_tolerance(self) -> bool:
        """Whether plain PyTorch differs from itself, and this by no more than is stated."""
        return self.tolerance is not None and self.max_relative_difference <= self.tolerance

    @property
    def holds(self) -> bool:
        """Whether the measured peak is within the budget."""
        return self.measured_peak_bytes <= self.budget_bytes

    @property
    def prediction_error(self) -> float:
        """Measured minus planned peak of the planned part, as a share of the activations."""
        activations = self.planned_peak_bytes - self.constant_bytes
        return (self.measured_program_bytes - self.planned_peak_bytes) / max(1, activations)

    @property
    def activation_ratio(self) -> float:
        """Measured activation peak of the planned part as a share of eager's."""
        eager = self.eager_peak_bytes - self.constant_bytes
        return (self.measured_program_bytes - self.constant_bytes) / eager


def _least_bytes_in_parts(fitted: Fitted) -> int:
    """Return the bytes of a step like the last with the least plan of every part."""
    route = fitted.route
    assert isinstance(route, InGraphs)  # else the step would have raised an error
    route.close_step()
    return route.steps.least_bytes()
