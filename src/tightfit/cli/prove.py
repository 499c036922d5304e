"""``tightfit prove``: train with plain PyTorch and with tightfit, and compare."""

from __future__ import annotations

from typing import Any

import msgspec

from tightfit.cli.console import terminal_progress
from tightfit.cli.options import (
    DEFAULT_MODEL_OPTIONS,
    BudgetText,
    Json,
    ModelOptions,
    PlannerName,
    Share,
    chosen_limits,
)
from tightfit.cli.output import print_result
from tightfit.cli.programs import prove_program
from tightfit.errors import BadInput, first_of
from tightfit.planners.registry import DEFAULT
from tightfit.units import format_bytes, format_percent, format_seconds

_DIFFERENCES_SHOWN = 5
_MINIMUM = "minimum"


def prove(
    model: str,
    /,
    *arguments: str,
    budget: BudgetText = None,
    budget_ratio: Share = None,
    steps: int = 3,
    rounds: int = 5,
    threads: int | None = None,
    planner: PlannerName = DEFAULT,
    time_limit: float = 10.0,
    costs: str = "measured",
    seed: int = 0,
    options: ModelOptions = DEFAULT_MODEL_OPTIONS,
    json: Json = False,
) -> int:
    """Train with plain PyTorch and with tightfit from the same seed; compare bits, peaks, times.

    Exit code 0 only if every loss, gradient, buffer and parameter has the same bits and the
    measured peak is within the budget; 1 if not. Where plain PyTorch itself gives other bits each
    time, results are compared within a tolerance, which is said. A model is fitted as tightfit.fit
    does; a tightfit.step in its place is proven as that step.

    A program is run as it is, plain and fitted, each in a process of its own, until it has taken
    its optimizer steps. After each of them every gradient, parameter and buffer is compared, and
    every printed line and the random state at the end. Modules that it fits itself stay plain in
    the plain run. Where it fits none, each module that it calls and trains is fitted.

    ```sh
    tightfit prove my_model.py:make --budget-ratio 0.5
    tightfit prove zoo:gpt2 --budget 2GiB --steps 3
    tightfit prove train.py --budget 8GiB --steps 20 -- --epochs 1
    ```

    Parameters
    ----------
    model
        zoo:NAME, package.module:factory or path/to/file.py:factory; or a program, path/to/file.py.
    arguments
        Arguments of the program.
    budget
        The budget with a unit, such as 300MiB, constants included; or minimum. For a program it
        replaces its own, and is needed if it fits nothing itself.
    budget_ratio
        The budget as a share of plain PyTorch's measured activation peak, such as 0.5.
    steps
        Optimizer steps to compare.
    rounds
        Rounds of interleaved timing of a model; 0 for none.
    threads
        Threads of PyTorch.
    time_limit
        Seconds to plan at most.
    costs
        measured, or modelled costs such as cpu, unit, flops.
    seed
        Of the model, its data and every step. A program has its own.
    """
    if model.endswith(".py"):
        if options.given or budget_ratio is not None or budget == _MINIMUM:
            raise BadInput(
                "a program takes a budget in bytes, such as --budget 8GiB, and options of its own "
                "behind --; --budget-ratio, --budget minimum and options of models are for models"
            )
        limits = chosen_limits(time_limit)
        return prove_program(
            model,
            arguments,
            as_json=json,
            budget=budget,
            steps=steps,
            threads=threads,
            planner=planner,
            limits=(limits.seconds, limits.gap),
            costs=costs,
        )
    if arguments:
        raise BadInput(f"{arguments[0]!r}: only a program, path/to/file.py, is given arguments")
    limits = chosen_limits(time_limit, seed=seed)
    from tightfit.api.prove import prove as prove_model

    with terminal_progress() as progress:
        proof = prove_model(
            model,
            budget=budget,
            budget_ratio=budget_ratio,
            steps=steps,
            rounds=rounds,
            seed=seed,
            threads=threads,
            model_options=options.keywords(),
            progress=progress,
            planner=planner,
            limits=limits,
            costs=costs,
        )
    numbers = msgspec.to_builtins(proof)
    numbers["status"] = proof.status if proof.succeeded else "error"
    return print_result(_text(proof), as_json=json, **numbers)


def _text(proof: Any) -> str:
    activations = proof.budget_bytes - proof.constant_bytes
    eager = proof.eager_peak_bytes - proof.constant_bytes
    within = "within" if proof.holds else "ABOVE"
    lines = [
        f"{proof.model} on {proof.device}: {'proven' if proof.succeeded else 'FAILED'}",
        f"  budget    {format_bytes(proof.budget_bytes)}, constants "
        f"{format_bytes(proof.constant_bytes)}; ratio {activations / eager:.3f}",
        f"  peak      measured {format_bytes(proof.measured_peak_bytes)}, {within} the budget; "
        f"plain PyTorch {format_bytes(proof.eager_peak_bytes)}",
        f"  predicted {format_bytes(proof.planned_peak_bytes)}; the planned part took "
        f"{format_bytes(proof.measured_program_bytes)} ({100 * proof.prediction_error:+.4f} %)",
        f"  results   {_results(proof)}",
        f"  overhead  planned {format_percent(proof.overhead)}, proven lower bound "
        f"{format_percent(proof.bound)} ({proof.status})",
    ]
    if proof.time_ratio is not None:
        rounds = ", ".join(f"{ratio:.3f}" for ratio in proof.time_ratios)
        lines.append(f"  time      {proof.time_ratio:.3f} x plain PyTorch (rounds: {rounds})")
    lines.append(f"  first call took {format_seconds(proof.seconds)} (capture, costs, plan, step)")
    return "\n".join(lines)


def _results(proof: Any) -> str:
    if proof.bitwise:
        losses = ", ".join(f"{loss:.6g}" for loss in proof.losses)
        return (
            "losses, gradients, buffers and parameters have the same bits in every step "
            f"(losses {losses})"
        )
    if proof.is_within_tolerance:
        return (
            "plain PyTorch gives other bits each time it is run; results differ by up to "
            f"{proof.max_relative_difference:.3g}, within the tolerance of {proof.tolerance:.3g} "
            "(8 times the difference between runs of plain PyTorch)"
        )
    shown = first_of(proof.differing, _DIFFERENCES_SHOWN)
    return f"DIFFER by up to {proof.max_relative_difference:.3g}: {shown}"
