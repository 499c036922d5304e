"""The result of a comparison of two trainings."""

from __future__ import annotations

import msgspec


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a proof; sizes in bytes with constants, times as ratios to eager.

    Parameters
    ----------
    status : str
        ``"optimal"`` or ``"feasible"``.
    budget_bytes, constant_bytes, measured_peak_bytes, eager_peak_bytes : int
        Peaks of whole steps from the second on.
    planned_peak_bytes, measured_program_bytes : int
        Peak of the planned part, without the optimizer step, in the step where it was highest:
        predicted and measured. A step may run some of the parts of a model planned part by part;
        the prediction is for these.
    overhead, bound, gap : float
        Predicted, as fractions.
    time_ratio : float or None
        Median over interleaved rounds of the step's time to eager's (CPU time on a CPU).
    time_ratios : tuple of float
        The rounds.
    bitwise : bool
        Whether every loss, gradient, buffer and parameter had the same bits.
    differing : tuple of str
        The losses, gradients, parameters and buffers that differ in any bit.
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
        """Whether the budget held and all bits are the same.

        Where plain PyTorch does not repeat its own bits, results within `tolerance` suffice.
        """
        return self.holds and (self.bitwise or self.is_within_tolerance)

    @property
    def is_within_tolerance(self) -> bool:
        """Whether plain PyTorch differs from itself, and results differ by at most `tolerance`."""
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
