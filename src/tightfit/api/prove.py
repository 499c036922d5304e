"""Prove on a real model that the budget holds and that nothing else changes.

The same training steps run once with plain PyTorch and once with tightfit, from the same state and
seed. Losses, gradients, buffers and parameters are compared bit by bit. Peaks are measured, and the
time of a step is compared in interleaved rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from tightfit.api.requested import MINIMUM, requested_bytes
from tightfit.errors import BadInput
from tightfit.progress import SILENT, Progress, shown
from tightfit.studies.comparison import Comparison
from tightfit.studies.model import ModelSettings, Target, load_example, name_of
from tightfit.studies.proof import Proof

_PARTS = 6
"""Of the time of a proof; plain PyTorch's steps are one, planning and timing are the others."""


def prove(
    target: Target,
    *,
    budget: int | str | None = None,
    budget_ratio: float | None = None,
    steps: int = 3,
    rounds: int = 5,
    seed: int = 0,
    threads: int | None = None,
    model_options: Mapping[str, Any] | None = None,
    progress: Progress = SILENT,
    **keywords: Any,
) -> Proof:
    """Train with plain PyTorch and with tightfit from the same seed and compare everything.

    Parameters
    ----------
    target : str, callable or tuple
        A model's name (``"zoo:gpt2"``, ``"my/file.py:factory"``), a factory, or its result:
        ``(model, loss, args, target)``. The model is fitted as `tightfit.fit` does; a
        `tightfit.step` in its place is proven as that step.
    budget : int or str, optional
        The budget, constants included; ``"minimum"``: the smallest with a plan found. Or
    budget_ratio : float, optional
        a share of eager's measured activation peak, on top of the constants.
    steps : int
        Optimizer steps to compare.
    rounds : int
        Interleaved timing rounds; 0 to leave timing out.
    seed : int
        Of the model, its data and every step.
    threads : int, optional
        Threads that PyTorch uses from now on.
    model_options : mapping, optional
        As `tightfit.studies.model.ModelSettings` has them: batch, size, ...
    **keywords
        As `tightfit.fit` takes them.

    Returns
    -------
    Proof
        Also of what failed: see `Proof.succeeded`.

    Raises
    ------
    BadInput
        For a target or a number that cannot be used.
    InfeasibleBudget
        If there is no plan within the budget.
    NothingToTrain
        If plain PyTorch trains nothing: no parameter moves.
    """
    budget_bytes = requested_bytes(budget, budget_ratio)
    if rounds < 0:
        raise BadInput(f"the number of timing rounds must not be negative, got {rounds}")
    if threads is not None and threads < 1:
        raise BadInput(f"the number of threads must be at least 1, got {threads}")
    if threads is not None:
        torch.set_num_threads(threads)
    torch.manual_seed(seed)
    example = load_example(target, ModelSettings(**(model_options or {})), takes_step=True)
    name = target if isinstance(target, str) else name_of(example.model)
    with shown(progress, f"proving {name}", _PARTS):
        comparison = Comparison(
            example, steps=steps, seed=seed, name=name, progress=progress, **keywords
        )
        progress.update(1, "plain PyTorch has run")
        if budget == MINIMUM:
            proof = comparison.at_least(comparison.least_bytes(), rounds=rounds)
            return msgspec.structs.replace(proof, minimum_budget_bytes=proof.budget_bytes)
        if budget_ratio is not None:
            budget_bytes = comparison.budget_of(budget_ratio)
        assert budget_bytes is not None
        return comparison.at(budget_bytes, rounds=rounds)
