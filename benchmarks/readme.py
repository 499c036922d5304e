"""Write the table of training runs into README.md and docs/measured.md, and draw their plot.

    python benchmarks/readme.py

The newest run of each model and setting in ``benchmarks/results/training.jsonl`` counts, and on a
GPU in ``gpu_training.jsonl`` and ``gpu_proofs.jsonl``; no number in the tables is typed by hand.
The README compares ways at equal memory; docs/measured.md has every row.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import gpu_table
from benchmarks.documents import with_section
from benchmarks.pictures.training import Measured, TrainedModel, training_picture
from benchmarks.rows import Row, read_rows

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
ROWS = RESULTS / "training.jsonl"
GPU_ROWS = RESULTS / "gpu_training.jsonl"
GPU_PROOFS = RESULTS / "gpu_proofs.jsonl"
PLOT = ROOT / "docs" / "training.svg"
GPU_PLOT = ROOT / "docs" / "training-gpu.svg"
README = ROOT / "README.md"
DOCUMENT = ROOT / "docs" / "measured.md"
NAMES = {
    "resnet50": "ResNet-50",
    "gpt2": "GPT-2 small",
    "mobilenet_v2": "MobileNetV2",
    "unet": "U-Net",
}


def main() -> None:
    """Write table and plot."""
    PLOT.write_text(plot_of(newest_runs(read_rows(ROWS))))
    GPU_PLOT.write_text(gpu_table.picture(gpu_table.rows()))
    for page, text in ((DOCUMENT, section()), (README, short_section())):
        page.write_text(with_section(page.read_text(), "training", text))


def short_section() -> str:
    """Return what stands in the README: for each model the ways that hold about as much."""
    lines = [
        "| model | plain PyTorch | PyTorch in its least memory | tightfit in at most that memory | "
        "tightfit's least budget measured |",
        "|---|--:|--:|--:|--:|",
    ]
    runs = newest_runs(read_rows(ROWS)).items()
    exact = {name: rows for name, rows in runs if "exactness" not in rows[0]["settings"]}
    return "\n".join([*lines, *(_at_equal_memory(name, rows) for name, rows in exact.items())])


def _at_equal_memory(name: str, rows: list[Row]) -> str:
    """Return a line: the way of others that holds least, and ours that holds no more than that."""
    ran = [row for row in rows if "error" not in row]
    ours = [row for row in ran if row["way"].startswith("tightfit")]
    others = [row for row in ran if row not in ours and row["way"] != "eager"]
    plain = next(row for row in ran if row["way"] == "eager")
    other = min(others, key=lambda row: (row["peak_bytes"], row["time_ratio"]))
    within = [row for row in ours if row["peak_bytes"] <= other["peak_bytes"]]
    equal, least = max(within, key=_peak), min(ours, key=_peak)
    cells = [f"{plain['peak_bytes'] / 2**20:.0f} MiB", *map(_cell, (other, equal, least))]
    return f"| {name} | " + " | ".join(cells) + " |"


def _peak(row: Row) -> int:
    return int(row["peak_bytes"])


def _cell(row: Row) -> str:
    return f"{row['peak_bytes'] / 2**20:.0f} MiB, {row['time_ratio']:.2f}x"


def section() -> str:
    """Return what stands in docs/measured.md: the runs on a CPU, then those on a GPU."""
    proven = gpu_section(newest_runs(read_rows(GPU_ROWS)), newest_runs(read_rows(GPU_PROOFS)))
    later, first = gpu_table.later_table(), gpu_table.table(gpu_table.rows())
    picture = f"![On a GPU]({GPU_PLOT.name})"
    earlier = "An earlier version, on the same kind of GPU:"
    own = section_of(newest_runs(read_rows(ROWS)))
    return "\n\n".join([own, proven, later, earlier, first, picture])


def gpu_section(runs: dict[str, list[Row]], proofs: dict[str, list[Row]]) -> str:
    """Return what was measured on a GPU; that nothing was, if so."""
    if not runs and not proofs:
        return "On a GPU (`make gpu-proof` measures more):"
    lines = [
        f"On {rows[0]['device']}, {name}: {sum(_held(row) for row in rows)} of {len(rows)} proofs "
        "held (all bits the same, peak within the budget)."
        for name, rows in proofs.items()
    ]
    return "\n".join([*lines, "", section_of(runs)] if runs else lines)


def _held(row: Row) -> bool:
    return bool(row.get("bitwise")) and bool(row.get("holds"))


def newest_runs(rows: list[Row]) -> dict[str, list[Row]]:
    """Return the rows of the newest run of each model and setting, by its title."""
    runs: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["date"]):
        settings = ", ".join(f"{key} {value}" for key, value in row["settings"].items())
        name = NAMES[row["model"]] + (f" ({settings})" if settings else "")
        if name in runs and runs[name][0]["date"] != row["date"]:
            del runs[name]
        runs.setdefault(name, []).append(row)
    return runs


def section_of(runs: dict[str, list[Row]]) -> str:
    """Return the markdown of all runs."""
    lines = [
        "| model | way | memory | of plain | time | planned extra (proven least) | bitwise |",
        "|---|---|--:|--:|--:|--:|---|",
    ]
    for name, rows in runs.items():
        lines += [_line(name if index == 0 else "", row) for index, row in enumerate(rows)]
    return "\n".join([*lines, "", *_notes(runs)])


def _line(name: str, row: Row) -> str:
    way = row["way"].split()
    title = f"**tightfit**, budget {float(way[1]):.0%}" if way[0] == "tightfit" else row["way"]
    if "error" in row:
        return f"| {name} | {title} | {_failure(row)} | | | | |"
    extra = _extra(row) if "bound" in row else ""
    return (
        f"| {name} | {title} | {row['peak_bytes'] / 2**20:.0f} MiB | {row['ratio']:.3f} "
        f"| {row['time_ratio']:.2f}x | {extra} | {'yes' if row['bitwise'] else 'no'} |"
    )


def _extra(row: Row) -> str:
    """Return overhead and bound; a bound above the overhead contradicts it: no proof."""
    is_proof = row["bound"] <= row["overhead"] + 1e-9
    return f"{row['overhead']:+.1%} ({format(row['bound'], '+.1%') if is_proof else 'not proven'})"


def _failure(row: Row) -> str:
    if not row["way"].startswith("tightfit"):
        return row["error"].split(":")[0]
    return "none, proven" if "proven: there is none" in row["error"] else "no plan"


def _notes(runs: dict[str, list[Row]]) -> list[str]:
    rows = [rows[0] for rows in runs.values()]
    clock = "device" if any(row["device"].startswith("cuda") for row in rows) else "processor"
    return [
        "Memory is the peak of a step above its start, new gradients included. Time is the median "
        f"over interleaved rounds of the {clock} time's ratio to plain PyTorch's; `none, proven`: "
        "no plan can fit. "
        + " ".join(
            f"{name}: {row['rounds']} rounds, {row['threads']} thread, {row['device']}, "
            f"PyTorch {row['torch']}, {row['date'][:10]}, load {row['load']}."
            for name, row in zip(runs, rows, strict=True)
        ),
    ]


def plot_of(runs: dict[str, list[Row]]) -> str:
    """Return an SVG with one panel per run: time ratio over memory ratio."""
    models = [
        TrainedModel(
            name,
            tuple(
                Measured(row["way"], row["ratio"], row["time_ratio"])
                for row in rows
                if "error" not in row
            ),
        )
        for name, rows in runs.items()
    ]
    notes = [
        "Time of a step against its peak memory, both as shares of plain PyTorch's. sequential: "
        "checkpoint_sequential",
        "in 4 or 6 segments; memory budget: activation_memory_budget of PyTorch's partitioner.",
    ]
    return training_picture(models, title="Training in less memory", notes=notes).decode()


if __name__ == "__main__":
    main()
