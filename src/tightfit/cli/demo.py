"""``tightfit demo``: two models trained at several budgets, with and without tightfit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tightfit.cli.console import terminal_progress
from tightfit.cli.options import Json
from tightfit.cli.output import FITS, print_result
from tightfit.units import format_bytes

if TYPE_CHECKING:
    from tightfit.studies.proof import Proof


def demo(*, quick: Annotated[bool, Parameter(negative="")] = False, json: Json = False) -> int:
    """Train ResNet-50 and GPT-2 at several budgets, with and without tightfit (minutes).

    ```sh
    tightfit demo --quick
    ```

    Parameters
    ----------
    quick
        Train a small MobileNetV2 instead, in half a minute.
    """
    from tightfit.studies.demonstration import DEMONSTRATION, QUICK, demonstrate

    with terminal_progress() as progress:
        proofs = demonstrate(QUICK if quick else DEMONSTRATION, progress=progress)
    if not json:
        _print_table(proofs)
        return FITS
    rows = [{**{k: getattr(p, k) for k in p.__struct_fields__}, "holds": p.holds} for p in proofs]
    return print_result("", as_json=True, status="feasible", proofs=rows)


def _print_table(proofs: tuple[Proof, ...]) -> None:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=_summary(proofs))
    table.add_column("model", no_wrap=True)
    for title in ("budget", "planned", "measured", "extra", "time", "equal"):
        table.add_column(title, justify="right", no_wrap=True)
    model = None
    for proof in proofs:
        if proof.model != model:
            model = proof.model
            table.add_section()
            table.add_row(model, "none", "", format_bytes(proof.eager_peak_bytes), "", "1.00x", "")
        table.add_row(
            "",
            format_bytes(proof.budget_bytes),
            format_bytes(proof.planned_peak_bytes),
            format_bytes(proof.measured_peak_bytes),
            f"{proof.overhead:+.1%}",
            f"{proof.time_ratio:.2f}x" if proof.time_ratio is not None else "",
            "bitwise" if proof.bitwise else f"{proof.max_relative_difference:.1e}",
        )
    Console().print(table)


def _summary(proofs: tuple[Proof, ...]) -> str:
    held = sum(proof.holds for proof in proofs)
    equal = sum(proof.bitwise for proof in proofs)
    return (
        f"{held} of {len(proofs)} within the budget, {equal} of {len(proofs)} bitwise equal to "
        "plain PyTorch, the row without a budget. Peaks are of a whole step with all that is "
        "resident. Extra compute is as planned. Time is a step's against plain PyTorch's. Equal: "
        "bitwise, or the largest difference in losses, gradients, buffers and parameters."
    )
