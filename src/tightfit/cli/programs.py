"""``tightfit prove train.py``: a program, plain and fitted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from tightfit.cli.console import terminal_progress
from tightfit.cli.output import print_result
from tightfit.units import format_bytes, format_seconds


def prove_program(script: str, arguments: Sequence[str], *, as_json: bool, **options: Any) -> int:
    """Prove a program; print the result; return the exit code."""
    from tightfit.scripts.prove import prove_script

    with terminal_progress() as progress:
        proof = prove_script(script, arguments, progress=progress, **options)
    numbers = msgspec.to_builtins(proof)
    status = "feasible" if proof.succeeded else "error"
    return print_result(_text(proof), as_json=as_json, status=status, **numbers)


def _text(proof: Any) -> str:
    found = "proven" if proof.succeeded else f"NOT PROVEN: {proof.verdict}"
    lines = [
        f"{proof.script}, {proof.steps} optimizer steps: {found}",
        f"  fitted    {', '.join(proof.fitted) or 'nothing'}",
        f"  budget    {_budget(proof)}",
    ]
    if proof.difference is not None:
        lines.append(f"  differs   {_difference(proof)}")
    elif proof.verdict == "nothing trained":
        lines.append("  trained   nothing: no parameter moves, and no gradient is other than zero")
    else:
        lines.append(
            f"  results   {proof.tensors} gradients, parameters and buffers have the same bits "
            f"after every step; so have {proof.lines} printed lines and the random state at the end"
        )
    if proof.left_out and proof.verdict != "not deterministic":
        lines.append(
            f"  left out  {proof.left_out} printed lines or random states that two plain runs have "
            "not in common: times, say, or generators without a seed"
        )
    plain, fitted = format_seconds(proof.plain_s), format_seconds(proof.fitted_s)
    lines.append(f"  took      {plain} plain, {fitted} fitted (first steps and plans included)")
    return "\n".join(lines)


def _budget(proof: Any) -> str:
    sizes = (proof.budget_bytes, proof.measured_peak_bytes, proof.eager_peak_bytes)
    budget, peak, eager = ("unknown" if s is None else format_bytes(s) for s in sizes)
    within = "within" if proof.holds else "ABOVE"
    return f"{budget}; from fit on at most {peak}, {within} the budget; plain PyTorch {eager}"


def _difference(proof: Any) -> str:
    found = proof.difference
    runs = "two plain runs" if proof.verdict == "not deterministic" else "the plain and fitted run"
    where = f"first after step {found.step}" if found.step else "first before any step"
    if found.kind == "line":
        return f"{where}: {runs} print {found.name}"
    if found.kind == "generator":
        return f"{where}: {runs} end with other states of the generator {found.name}"
    if found.kind == "order":
        return f"{where}: of {runs} one {found.name}"
    others = f", and {found.others} more" if found.others else ""
    return f"{where}: of {runs} the {found.name}{_by(proof.largest_difference)}{others}"


def _by(largest_difference: float | None) -> str:
    if largest_difference is None:
        return ""
    if math.isinf(largest_difference):
        return ", which only one of them has"
    return f" by up to {largest_difference:.3g}" if largest_difference else " in signs of zeros"
