"""What a proof showed."""

from __future__ import annotations

import msgspec

__all__ = ["Proof"]


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """What a proof showed; sizes in bytes with constants, times as ratios to eager.

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
        What had not.
    max_relative_difference : float
        Over the final gradients, buffers and parameters.
    losses : tuple of float
        Of the planned steps.
    minimum_budget_bytes : int or None
        The smallest budget with a plan found, if that was asked for.
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

    @property
    def succeeded(self) -> bool:
        """Whether everything was shown: the budget held and all bits are the same."""
        return self.holds and self.bitwise

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
