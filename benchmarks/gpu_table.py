"""What was measured on one H200 on 26 and 27 November 2026, for the documentation.

    python benchmarks/readme.py

The rows in ``benchmarks/results/gpu_h200_2026-11-26.jsonl`` are those of that session as they came:
PyTorch 2.11, tightfit at 3666872, synthetic data, one process at a time but for those of call 1,
whose times mean nothing. Peaks are from the allocator's own trace, not from peak statistics. Rows
with another setting of the allocator (`conf`, `variant`) are not in the table.

Those in ``benchmarks/results/gpu_h200_2026-11-27.jsonl`` are the first rows of `gpu_limit.py`
there, at 327918a, one process at a time. `reserved_bytes` was corrected: the benchmark had taken
what plain PyTorch had cached before off it. The limit then was `limit_bytes`, for the same reason.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.pictures.training import Measured, TrainedModel, training_picture
from benchmarks.rows import Row, read_rows

__all__ = ["FILE", "later_table", "picture", "table"]

FILE = Path(__file__).resolve().parent / "results" / "gpu_h200_2026-11-26.jsonl"
LATER = FILE.with_name("gpu_h200_2026-11-27.jsonl")
GIB = 1 << 30
TITLES = {
    "resnet50": "ResNet-50 (batch 128, float32, SGD)",
    "hf:gpt2": "GPT-2 medium (8 x 1024, bfloat16, AdamW)",
    "hf:llama": "Llama 1.1B (4 x 2048, bfloat16, AdamW)",
    "timm:vit_base_patch16_224": "ViT-B/16 (batch 64, bfloat16, AdamW)",
    "unet": "U-Net (11 x 416 x 608, float32, SGD)",
}
WAYS = {
    "plain": "plain PyTorch",
    "checkpoint": "its activation checkpointing",
    "mincut=0.5": "activation_memory_budget 0.5",
}


def shown(rows: list[Row]) -> dict[str, list[Row]]:
    """Return the rows of each model, plain PyTorch's first and once, the least memory last."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        own = row.get("variant") == "default" and not row.get("conf") and "error" not in row
        if row["call"] > 1 and own:
            known = found.setdefault(row["model"], [])
            if row["way"] != "plain" or not known:
                known.append(row)
    for known in found.values():
        known.sort(key=lambda row: -row["share"])
    return found


def table(rows: list[Row]) -> str:
    """Return the table, and what was measured."""
    models = shown(rows)
    lines = [
        "| model | way | memory | of plain | time | in a row | planned extra (proven least) | "
        "reserved / budget |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for model, known in models.items():
        for number, row in enumerate(known):
            lines.append(_line(TITLES[model] if number == 0 else "", row))
    first = next(iter(models.values()))[0]
    bits = [row for row in rows if "bits" in row]
    same = sum(bool(row["bits"]) for row in bits)
    return "\n".join(
        [
            *lines,
            "",
            f"One {first['device']}, PyTorch {first['torch']}, tightfit at {first['commit']}, "
            "synthetic data. Memory is the peak above the bytes between steps, gradients "
            "included; time is a synchronised step's, and that of twenty in a row, as a multiple "
            "of plain PyTorch's. Parameters after 8 to 12 steps have the bits of plain PyTorch in "
            f"{same} of {len(bits)} runs. A GPT-2 with dropout in float32 ended with a "
            "segmentation fault while its operators were measured. Reserved: by PyTorch's "
            "allocator, which was not limited then. The rows: "
            "[benchmarks/results/gpu_h200_2026-11-26.jsonl]"
            "(benchmarks/results/gpu_h200_2026-11-26.jsonl).",
        ]
    )


def _line(title: str, row: Row) -> str:
    way = row["way"]
    name = f"**tightfit**, budget {row['ratio']:.0%}" if way == "tightfit" else WAYS[way]
    memory = (row["peak"] - row["resident"]) / GIB
    extra = reserved = ""
    if way == "tightfit":
        extra = f"{row['overhead']:+.1%} ({row['bound']:+.1%})"
        reserved = f"{row['reserved_over']:.2f}"
    return (
        f"| {title} | {name} | {memory:.2f} GiB | {row['share']:.3f} | {row['time_ratio']:.2f}x "
        f"| {row['async_ratio']:.2f}x | {extra} | {reserved} |"
    )


LATER_TITLES = {
    "resnet50": "ResNet-50 (batch 128, SGD)",
    "gpt2": "GPT-2 small (8 x 1024, SGD)",
    "vit": "ViT-B/16 (batch 64, SGD)",
}


def later_table() -> str:
    """Return the table of the rows of 27 November, and what was measured."""
    rows = read_rows(LATER)
    lines = [
        "| model, float32 | budget | time in a row | planned extra (proven least) | "
        "reserved / budget | retries |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        if row["way"] == "limit":
            lines.append(
                f"| {LATER_TITLES[row['model']]} | {row['budget_ratio']:.0%} | "
                f"{row['time_ratio']:.3f}x | {row['overhead']:+.1%} ({row['bound']:+.1%}) | "
                f"{row['reserved_over']:.2f} | {row['retries']} |"
            )
    first = rows[0]
    return "\n".join(
        [
            *lines,
            "",
            f"One {first['device'].split(', ')[1]}, PyTorch {first['torch']}, tightfit at "
            f"{first['commit']}, synthetic data; a budget is a share of plain PyTorch's peak "
            "above the bytes between steps. The limit did not bind: blocks that plain PyTorch had "
            "cached before, in the same process, were added to it. That is mended; how steps go "
            "where it binds has not been measured since (`make gpu-proof` does). The rows: "
            "[benchmarks/results/gpu_h200_2026-11-27.jsonl]"
            "(benchmarks/results/gpu_h200_2026-11-27.jsonl).",
        ]
    )


def picture(rows: list[Row]) -> str:
    """Return an SVG with one panel per model: time over memory, both as shares of plain's."""
    models = [
        TrainedModel(
            TITLES[model],
            tuple(Measured(_way(row), row["share"], row["async_ratio"]) for row in known),
        )
        for model, known in shown(rows).items()
    ]
    notes = [
        "One H200, PyTorch 2.11, synthetic data: time of twenty steps in a row against the peak "
        "above what stays,",
        "both as shares of plain PyTorch's; memory budget: activation_memory_budget 0.5.",
    ]
    return training_picture(models, title="Training in less memory, on a GPU", notes=notes).decode()


def _way(row: Row) -> str:
    names = {"plain": "eager", "checkpoint": "checkpoint per block"}
    if row["way"] == "tightfit":
        return f"tightfit {row['ratio']}"
    return names.get(row["way"], "activation_memory_budget 0.5")


def rows() -> list[Row]:
    """Return the rows of that session."""
    return read_rows(FILE)
