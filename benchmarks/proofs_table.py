"""Write docs/models.md, the table of proofs on models people have, from its committed rows.

python benchmarks/proofs_table.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.rows import Row, read_rows

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "benchmarks" / "results" / "proofs_models.jsonl"
TABLE = ROOT / "docs" / "models.md"
BUDGETS = ("0.8", "0.6", "minimum")

HEAD = """# Proofs on models people have

Written by `benchmarks/proofs_table.py` from `benchmarks/results/proofs_models.jsonl`, which
`benchmarks/proofs.py --suite models` appends to. Small configurations from `transformers` and
`monai` with random weights, as in `benchmarks/real_models.py`. Memory is the activation peak as a
share of plain PyTorch's; the prediction's error is a share of the planned activations. Extra
compute is predicted, by measured costs or, where a row says `"costs": "cpu"`, modelled ones.

m2m100 leaves layers out at random and is planned part by part. Room is kept for all layers. The
prediction is for those that ran, from bytes held by the step before and from the plans.

| model | budget | memory | within budget | prediction off by | bitwise | extra compute |
|---|---|--:|---|--:|---|--:|
"""


def line(row: Row) -> str:
    """Return a row of the table."""
    if row["exit_code"] not in (0, 1):
        return f"| {row['model']} | {row['asked']} | | refused: {row.get('message')} | | | |"
    constant, planned = row["constant_bytes"], row["planned_peak_bytes"]
    program = row["measured_program_bytes"]
    share = (program - constant) / (row["eager_peak_bytes"] - constant)
    error = (program - planned) / (planned - constant)
    holds = "yes" if row["measured_peak_bytes"] <= row["budget_bytes"] else "no"
    bits = "yes" if row["bitwise"] else "no"
    cells = (row["model"], row["asked"], f"{share:.3f}", holds, f"{error:+.3%}", bits)
    return f"| {' | '.join(cells)} | {row['overhead']:+.1%} |"


def main() -> None:
    """Write the table; of several rows of a model and budget the last counts."""
    rows = {}
    for row in read_rows(ROWS):
        rows[row["model"].rpartition(":")[2], row["asked"]] = row
    models = dict.fromkeys(model for model, _ in rows)
    ordered = [(m, b) for m in models for b in BUDGETS if (m, b) in rows]
    lines = [line({**rows[m, b], "model": m}) for m, b in ordered]
    TABLE.write_text(HEAD + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
