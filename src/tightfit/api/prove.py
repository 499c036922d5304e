"""Prove on a real model that the budget holds and that nothing else changes.

The same training steps run once with plain PyTorch and once with tightfit, from the same state and
seed: losses, gradients, buffers and parameters are compared bit by bit, peaks are measured, and
the time of a step is compared in interleaved rounds.
"""

from __future__ import annotations

import gc
import hashlib
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch
from torch import nn

from tightfit.api.constants import gradient_bytes, optimizer_state_bytes, resident_tensor_bytes
from tightfit.api.fit import PlannedStep, step
from tightfit.capture.signature import flatten
from tightfit.errors import BadInput
from tightfit.execution.guard import Guard
from tightfit.planners.registry import DEFAULT
from tightfit.progress import SILENT, Progress

__all__ = ["Proof", "prove"]

_UNLIMITED = 1 << 60


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """What a proof showed; sizes in bytes with constants, times as ratios to eager.

    Parameters
    ----------
    status : str
        ``"optimal"`` or ``"feasible"``.
    budget_bytes, constant_bytes, planned_peak_bytes, measured_peak_bytes, eager_peak_bytes : int
        Peaks of whole steps from the second on; `planned_peak_bytes` of the planned part.
    measured_program_bytes : int
        Peak of the planned part, the optimizer step left out.
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

    @property
    def holds(self) -> bool:
        """Whether the measured peak is within the budget."""
        return self.measured_peak_bytes <= self.budget_bytes

    @property
    def activation_ratio(self) -> float:
        """Measured activation peak of the planned part as a share of eager's."""
        eager = self.eager_peak_bytes - self.constant_bytes
        return (self.measured_program_bytes - self.constant_bytes) / eager


class _Subject:
    """A model with data, an optimizer and a way back to its first state."""

    def __init__(self, example: Any, seed: int) -> None:
        self.model: nn.Module = example.model.train()
        self.loss = example.loss
        self.target = example.target
        self.args = example.args
        self.seed = seed
        self.device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        self.granularity = 64 if self.device.type == "cpu" else 512
        self.initial = {k: v.clone() for k, v in self.model.state_dict().items()}
        self.optimizer: Any = None

    def reset(self) -> None:
        """Put parameters and buffers back, forget gradients and optimizer state."""
        self.model.load_state_dict(self.initial)
        self.model.zero_grad(set_to_none=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)

    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = ((), dict(self.args)) if isinstance(self.args, Mapping) else (self.args, {})
        if self.loss is not None:
            kwargs = {**kwargs, "_target": self.target}
        return tuple(args), kwargs

    def loss_of(self, *args: Any, _target: Any = None, **kwargs: Any) -> torch.Tensor:
        """Compute the loss from the inputs."""
        output = self.model(*args, **kwargs)
        if self.loss is not None:
            return self.loss(output, _target)
        loss = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
        if loss is None and isinstance(output, dict):
            loss = output.get("loss")
        if not isinstance(loss, torch.Tensor):
            raise BadInput(
                "the factory gave no loss and the model's output is neither a loss nor carries "
                "one as .loss"
            )
        return loss

    def constant_bytes(self) -> int:
        tensors = list(self.model.parameters()) + list(self.model.buffers())
        tensors += [t for t in flatten(*self.inputs())[0] if isinstance(t, torch.Tensor)]
        modules = {"model": self.model}
        total = resident_tensor_bytes(tensors, self.granularity)
        total += gradient_bytes(modules, self.granularity)
        if any(self.optimizer.state.values()):
            total += optimizer_state_bytes(
                self.optimizer, modules, self.granularity, self.device.type
            )
        return total


class _Trace(msgspec.Struct):
    """What a series of steps left behind."""

    losses: list[float]
    digests: list[dict[str, bytes]]
    final: dict[str, torch.Tensor]
    peak_bytes: int
    program_bytes: int
    constant_bytes: int
    first_s: float


def prove(
    example: Any,
    *,
    budget_bytes: int | None = None,
    budget_ratio: float | None = None,
    steps: int = 3,
    rounds: int = 5,
    seed: int = 0,
    name: str = "",
    progress: Progress = SILENT,
    planner: str = DEFAULT,
    **keywords: Any,
) -> Proof:
    """Train with plain PyTorch and with tightfit from the same seed and compare everything.

    Parameters
    ----------
    example : Example
        ``model``, ``loss(output, target)`` or None, ``args`` (tuple or dict), ``target``.
    budget_bytes : int, optional
        The budget, constants included; or
    budget_ratio : float, optional
        a share of eager's activation peak, on top of the constants.
    steps : int
        Optimizer steps to compare.
    rounds : int
        Interleaved timing rounds; 0 to leave timing out.

    Raises
    ------
    InfeasibleBudget
        If there is no plan within the budget.
    """
    if (budget_bytes is None) == (budget_ratio is None):
        raise BadInput("give either a budget in bytes or a budget ratio")
    if steps < 2:
        raise BadInput("a proof needs at least 2 steps: peaks are measured from the second on")
    subject = _Subject(example, seed)
    progress.start("proving", 3 + rounds)
    progress.update(0, "plain PyTorch")
    eager = _train(subject, subject.loss_of, steps)
    if budget_bytes is None:
        assert budget_ratio is not None
        activations = eager.peak_bytes - eager.constant_bytes
        budget_bytes = eager.constant_bytes + int(budget_ratio * activations)
    progress.update(1, "tightfit")
    subject.reset()
    planned = step(
        subject.loss_of,
        modules=subject.model,
        budget=budget_bytes,
        optimizer=subject.optimizer,
        planner=planner,
        on_exceed="warn",
        **keywords,
    )
    trace = _train(subject, planned, steps, planned)
    ratios = _time(subject, planned, rounds, progress)
    progress.stop()
    session = planned._session
    report = session.report()
    differing = _differing(eager, trace)
    return Proof(
        status=report.status,
        model=name,
        device=subject.device.type,
        budget_bytes=budget_bytes,
        constant_bytes=trace.constant_bytes,
        planned_peak_bytes=report.planned_peak_bytes,
        measured_peak_bytes=max(trace.peak_bytes, session.highest_peak_bytes),
        measured_program_bytes=session.guard.steps[-1].program_bytes,
        eager_peak_bytes=eager.peak_bytes,
        overhead=report.overhead,
        bound=report.bound,
        gap=report.gap,
        time_ratio=statistics.median(ratios) if ratios else None,
        time_ratios=tuple(ratios),
        bitwise=not differing,
        differing=differing,
        max_relative_difference=_largest_difference(eager.final, trace.final),
        losses=tuple(trace.losses),
        seconds=trace.first_s,
    )


def _train(
    subject: _Subject,
    function: Callable[..., torch.Tensor],
    steps: int,
    planned: PlannedStep | None = None,
) -> _Trace:
    """Run steps from the first state; a guard of our own watches when the function has none."""
    if planned is None:
        subject.reset()
    own = Guard(_UNLIMITED, subject.device.type, "warn", subject.constant_bytes)
    trace = _Trace([], [], {}, 0, 0, 0, 0.0)
    torch.manual_seed(subject.seed)
    for index in range(steps):
        subject.model.zero_grad(set_to_none=True)
        gc.collect()
        began = time.perf_counter()
        loss = _watched_step(subject, function, own if planned is None else None)
        if index == 0:
            trace.first_s = time.perf_counter() - began
        guard = own if planned is None else planned._session.guard
        assert guard is not None
        peaks = guard.close()
        if peaks is not None and index > 0:
            trace.peak_bytes = max(trace.peak_bytes, peaks.peak_bytes)
            trace.program_bytes = max(trace.program_bytes, peaks.program_bytes)
            trace.constant_bytes = peaks.constant_bytes
        trace.losses.append(loss)
        trace.digests.append(_digests(subject))
    trace.final = {k: v.clone() for k, v in _tensors(subject).items()}
    return trace


def _watched_step(
    subject: _Subject, function: Callable[..., torch.Tensor], guard: Guard | None
) -> float:
    args, kwargs = subject.inputs()
    if guard is not None:
        guard.before_forward()
    loss = function(*args, **kwargs)
    if guard is not None:
        guard.after_forward()
    loss.backward()
    if guard is not None:
        guard.after_backward()
    subject.optimizer.step()
    return float(loss.detach())


def _tensors(subject: _Subject) -> dict[str, torch.Tensor]:
    found = {f"gradient of {k}": p.grad for k, p in subject.model.named_parameters()}
    found |= {f"parameter {k}": p.detach() for k, p in subject.model.named_parameters()}
    found |= {f"buffer {k}": b for k, b in subject.model.named_buffers()}
    return {k: t for k, t in found.items() if t is not None}


def _digests(subject: _Subject) -> dict[str, bytes]:
    return {
        key: hashlib.blake2b(
            tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy(), digest_size=16
        ).digest()
        for key, tensor in _tensors(subject).items()
        if tensor.numel()
    }


def _differing(eager: _Trace, planned: _Trace) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for index, (a, b) in enumerate(zip(eager.losses, planned.losses, strict=True)):
        if a != b and not (a != a and b != b):
            found[f"loss of step {index + 1}"] = None
    for index, (a, b) in enumerate(zip(eager.digests, planned.digests, strict=True)):
        for key in sorted({*a, *b}):
            if a.get(key) != b.get(key):
                found.setdefault(f"{key} (first in step {index + 1})")
    return tuple(found)


def _largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Return the largest difference, relative to the largest magnitude of its kind."""
    largest = 0.0
    scale: dict[str, float] = {}
    for key, tensor in a.items():
        kind = key.split()[0]
        if tensor.is_floating_point() and tensor.numel():
            scale[kind] = max(scale.get(kind, 0.0), float(tensor.abs().max()))
    for key, tensor in a.items():
        if key in b and tensor.is_floating_point() and tensor.numel():
            difference = float((tensor - b[key]).abs().max())
            largest = max(largest, difference / (scale[key.split()[0]] or 1.0))
    return largest


def _time(subject: _Subject, planned: PlannedStep, rounds: int, progress: Progress) -> list[float]:
    """Return the time ratio of planned to plain steps, interleaved, order alternating."""
    if rounds == 0:
        return []
    session = planned._session
    while session.is_tuning:
        _once(subject, planned)
        session.close_step()
    _once(subject, planned)
    session.close_step()
    ratios = []
    for index in range(rounds):
        progress.update(2 + index, "timing")
        if index % 2:
            plain = _once(subject, subject.loss_of)
            ours = _once(subject, planned)
            session.close_step()
        else:
            ours = _once(subject, planned)
            session.close_step()
            plain = _once(subject, subject.loss_of)
        ratios.append(ours / plain)
    return ratios


def _once(subject: _Subject, function: Callable[..., torch.Tensor]) -> float:
    """Run one step; return its time: CPU time on a CPU, device time on a GPU."""
    subject.model.zero_grad(set_to_none=True)
    args, kwargs = subject.inputs()
    gc.collect()
    if subject.device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function(*args, **kwargs).backward()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3
    began = time.process_time()
    function(*args, **kwargs).backward()
    return time.process_time() - began
