"""Write docs/features.md and its short form in README.md from the tables that the tests run.

python tests/write_features.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # where benchmarks/ is

from benchmarks import documents
from support.features import REFUSED, SUPPORTED, UNCOMPILED
from support.in_backward import OPTIMIZERS
from support.libraries import LIBRARIES
from support.models import CASES, EXECUTED, OUTSIDE, PARTLY, PLANNED, SEVERAL
from support.replicas import DATA_PARALLEL
from support.sharded import SHARDED
from support.training import WAYS
from tightfit.torch_private.releases import OLDEST, TABLE

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "features.md"
README = ROOT / "README.md"


def document() -> str:
    """Return the whole table."""
    lines = [
        "# What is supported, what is refused",
        "",
        "Written by `python tests/write_features.py` from the tables in `tests/support` that the "
        "tests run: each row is a test. Supported means: loss, gradients, buffers, mutated inputs "
        "and the next random number have the bits of plain PyTorch. Refused means: an error "
        "before anything is computed wrongly, with the name of the module and the way out; "
        "nothing falls back to plain PyTorch in silence.",
        "",
        "## Models: the same bits",
        "",
        "PyTorch's Dynamo follows the Python of a model and makes graphs of it. Where each model "
        "below runs is checked, too. Code that runs outside of every plan is announced with the "
        "reason, "
        "and listed in `tightfit.report(model).outside`; the limit holds for it, but nothing of it "
        "is computed again.",
        "",
        *(line for where in _WHERE for line in _models(where)),
        "## Ways of training: the same bits, measured peaks inside the budget",
        "",
        *(f"- {name}" for name in WAYS),
        "",
        "## The optimizer's step in backward (`update_in_backward=True`): the same bits",
        "",
        *(f"- {name}" for name in OPTIMIZERS),
        "",
        "Two parameter groups, learning-rate schedulers, tied weights, and the loss inside the "
        "plan or outside. Not supported together: "
        "[how-to/step-in-backward.md](how-to/step-in-backward.md).",
        "",
        "## Values moved to far memory (`offload=`): the same bits, measured peaks as simulated",
        "",
        "Plans with random moves and recomputations, to a file, and by streams of a GPU that are "
        "played on the CPU. Of models with:",
        "",
        *(f"- {name}" for name in EXECUTED),
        "",
        "A full disk, an error in a thread that copies and Ctrl-C amid a transfer are tested, too. "
        "Not supported together: [how-to/offload.md](how-to/offload.md).",
        "",
        "## Under other libraries: the same bits, measured peaks inside the budget",
        "",
        *(f"- {library.name}: {library.covers}" for library in LIBRARIES),
        "",
        "How each is used: [libraries.md](libraries.md).",
        "",
        "## Several processes: the same bits, measured peak of each rank inside the budget",
        "",
        *(f"- DistributedDataParallel: {name}" for name in DATA_PARALLEL),
        *(f"- FSDP2 (`fully_shard`): {name}" for name in SHARDED),
        "",
        "Two gloo processes on a CPU. How it works and what is counted: "
        "[distributed.md](distributed.md).",
        "",
        "## Compiled (`compile=True`): close to plain PyTorch",
        "",
        "All models and ways of training above, as far as plans hold them, but for these, "
        "which are refused by name (the way out is `compile=False`):",
        "",
        *(f"- {name}" for name in UNCOMPILED),
        "",
        "## Releases of PyTorch",
        "",
        f"From {'.'.join(map(str, OLDEST))} on; continuous integration tests 2.13, and "
        "`make releases` runs the batteries of this page, of operators and of `tightfit.online` on "
        "2.11 and 2.14; 2.12 passed them, too. What older releases do differently (the limit holds "
        "alike):",
        "",
        "| from | what | before |",
        "|---|---|---|",
        *(f"| {each.name} | {each.what} | {each.before} |" for each in TABLE),
        "",
        "Rows of models that run elsewhere there:",
        "",
        *(
            f"- {case.name}, before {case.before[0].name}: {case.before[1]}"
            for case in (*CASES, *SUPPORTED)
            if case.before is not None
        ),
        "",
        "## Refused",
        "",
        "One way out holds for every row, on the CPU: train the plain model in `with "
        "tightfit.online(budget=...)` ([online.md](online.md)), which needs no plan. Each message "
        "says so, and a test follows it for every row. Another test follows a way out of the "
        "table.",
        "",
        "| what | way out |",
        "|---|---|",
        *(f"| {refused.name} | {refused.way_out} |" for refused in REFUSED),
        "",
    ]
    return "\n".join(lines)


_WHERE = {
    PLANNED: "A module runs eagerly, as one measured op of the plan, where it is marked by "
    "`tightfit.opaque` or recurrent (`nn.RNN`, `nn.LSTM`, `nn.GRU`). So does an inner module in "
    "which data decide sizes, where its Python only computes and it does not hold most of the "
    "step.",
    SEVERAL: "Dynamo ends a graph where Python needs the value of a computed tensor, or calls what "
    "it cannot follow. The graphs are planned within one budget. Code between them runs "
    "eagerly, measured.",
    PARTLY: "Some modules run as plain PyTorch, or get gradients that no plan makes. The rest is "
    "planned.",
    OUTSIDE: "Nothing is planned: a budget below what plain PyTorch takes is refused in the step. "
    "[A refused model](how-to/a-refused-model.md) says how to have it planned.",
}


def _models(where: str) -> list[str]:
    """Return the part about models that run in one way."""
    names = [f"- {case.name}" for case in (*CASES, *SUPPORTED) if case.where == where]
    return [f"### {where.capitalize()}", "", _WHERE[where], "", *names, ""]


def section() -> str:
    """Return the short form for the README."""
    models = [*CASES, *SUPPORTED]
    partly = sum(case.where == PARTLY for case in models)
    outside = sum(case.where == OUTSIDE for case in models)
    return (
        f"Tests compare {len(models)} features of models and {len(WAYS)} ways of training with "
        f"plain PyTorch, bit by bit, and {len(DATA_PARALLEL) + len(SHARDED)} more with two "
        f"processes (DDP, FSDP2). {len(models) - partly - outside} of the features are planned, "
        f"{partly} in part; {outside} run as plain PyTorch within the limit, which is announced. "
        f"{len(REFUSED)} are refused, each with a way out. The list: "
        "[docs/features.md](docs/features.md)."
    )


def with_section(text: str) -> str:
    """Return the README with its section replaced."""
    return documents.with_section(text, "features", section())


def main() -> None:
    """Write both."""
    DOCUMENT.write_text(document())
    README.write_text(with_section(README.read_text()))


if __name__ == "__main__":
    main()
