"""Write docs/features.md and its short form in README.md from the tables that the tests run.

python tests/write_features.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # where benchmarks/ is

from support.features import REFUSED, SUPPORTED, UNCOMPILED
from support.libraries import LIBRARIES
from support.models import CASES
from support.replicas import DATA_PARALLEL
from support.sharded import SHARDED
from support.training import WAYS

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "features.md"
README = ROOT / "README.md"
BEGIN = "<!-- features: written by tests/write_features.py -->"
END = "<!-- end of features -->"


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
        *(f"- {case.name}" for case in (*CASES, *SUPPORTED)),
        "",
        "A module that cannot be seen into runs eagerly, as one measured op of the plan: marked "
        "by `tightfit.opaque`, recurrent (`nn.RNN`, `nn.LSTM`, `nn.GRU`), or found to decide by "
        "data what it runs (this is announced).",
        "",
        "A model that allows no single graph (numbers read from computed tensors, numpy, Python "
        "state, sparse gradients, layers left out at random) is planned part by part: inner "
        "modules that hold others are captured and planned each by itself, what lies between runs "
        "eagerly and is measured. This is announced. Where no such module is left, the model is "
        "refused as below.",
        "",
        "## Ways of training: the same bits, measured peaks inside the budget",
        "",
        *(f"- {name}" for name in WAYS),
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
        "All models and ways of training above, but for these models, which are refused by name "
        "(the way out is `compile=False`):",
        "",
        *(f"- {name}" for name in UNCOMPILED),
        "",
        "## Refused",
        "",
        "One way out holds for every row, on the CPU: train the plain model in `with "
        "tightfit.online(budget=...)` ([online.md](online.md)), which needs no plan. Each message "
        "says so, and a test follows it for every row that plain PyTorch runs.",
        "",
        "| what | way out |",
        "|---|---|",
        *(f"| {refused.name} | {refused.way_out} |" for refused in REFUSED),
        "",
    ]
    return "\n".join(lines)


def section() -> str:
    """Return the short form for the README."""
    names = "; ".join(refused.name for refused in REFUSED)
    return (
        f"{len(CASES) + len(SUPPORTED)} features of models and {len(WAYS)} ways of training are "
        f"each tested to give the bits of plain PyTorch, {len(DATA_PARALLEL) + len(SHARDED)} more "
        "with two processes (DistributedDataParallel and FSDP2: "
        "[docs/distributed.md](docs/distributed.md)); a module that cannot be seen into runs "
        "eagerly, as one measured op (`tightfit.opaque`). Refused, each with a way out: "
        f"{names}. All of them: [docs/features.md](docs/features.md)."
    )


def with_section(text: str) -> str:
    """Return the README with its section replaced."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{section()}\n{END}{after}"


def main() -> None:
    """Write both."""
    DOCUMENT.write_text(document())
    README.write_text(with_section(README.read_text()))


if __name__ == "__main__":
    main()
