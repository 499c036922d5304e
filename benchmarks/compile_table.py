"""Write the table of compiled steps into docs/compile.md from its committed rows.

python benchmarks/compile_table.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.documents import with_section
from benchmarks.rows import Row, read_rows

ROOT = Path(__file__).resolve().parents[1]
ROWS = ROOT / "benchmarks" / "results" / "compile.jsonl"
DOCUMENT = ROOT / "docs" / "compile.md"
NAMES = {"mlp": "MLP, 6 blocks", "gpt": "GPT, 2 layers"}


def main() -> None:
    """Write the table; of several runs of a model the newest counts."""
    section = section_of(newest(read_rows(ROWS)))
    DOCUMENT.write_text(with_section(DOCUMENT.read_text(), "measured", section))


def newest(rows: list[Row]) -> dict[str, list[Row]]:
    """Return the rows of the newest run of each model."""
    latest = {row["model"]: row["date"] for row in sorted(rows, key=lambda row: row["date"])}
    return {
        model: [row for row in rows if row["model"] == model and row["date"] == date]
        for model, date in latest.items()
    }


def section_of(runs: dict[str, list[Row]]) -> str:
    """Return the markdown of all runs."""
    lines = [
        "| model | way | memory | of plain | time | planned extra | largest difference |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    notes = []
    for model, rows in runs.items():
        lines += [_line(NAMES[model] if index == 0 else "", row) for index, row in enumerate(rows)]
        first = rows[0]
        notes.append(
            f"{NAMES[model]}: {first['rounds']} rounds, {first['threads']} thread, "
            f"{first['device']}, PyTorch {first['torch']}, {first['date'][:10]}, load "
            f"{first['load']}."
        )
    return "\n".join([*lines, "", " ".join(notes)])


def _line(name: str, row: Row) -> str:
    title = row["way"] if "share" not in row else _titled(row)
    if "error" in row:
        return f"| {name} | {title} | no plan | | | | |"
    extra = f"{row['overhead']:+.1%}" if "overhead" in row else ""
    return (
        f"| {name} | {title} | {row['peak_bytes'] / 2**20:.1f} MiB | {row['ratio']:.3f} "
        f"| {row['time_ratio']:.2f}x | {extra} | {row['difference']:.0e} |"
    )


def _titled(row: Row) -> str:
    if row["way"] == "torch.compile":
        return f"torch.compile, activation_memory_budget {row['share']:g}"
    single = row["way"] != "tightfit" and not row.get("compiled", True)
    how = ", ran operator by operator" if single else ""
    return f"**{row['way']}**, budget {row['budget_bytes'] / 2**20:.1f} MiB{how}"


if __name__ == "__main__":
    main()
