"""Write docs/loops.md, the table of training loops, from its committed rows.

python benchmarks/loops_table.py
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.rows import read_rows
from benchmarks.training_loops import LOOPS

ROOT = Path(__file__).resolve().parents[1]
ROWS = ROOT / "benchmarks" / "results" / "loops.jsonl"
LIVES = ROWS.with_name("fuzz_lives.jsonl")
TABLE = ROOT / "docs" / "loops.md"

_HEAD = """# Training loops as people write them

Written by `python benchmarks/loops_table.py` from the rows of `benchmarks/loops.py`; do not
edit. Each loop of [benchmarks/training_loops](../benchmarks/training_loops) is plain PyTorch
and the lines of tightfit. It runs plainly and fitted, in processes of their own with an empty
cache. The budget is 0.6 of the most that the plain program held. Where that is refused, it is
the least budget that the errors name, followed up to four times.

*Held* is the peak of bytes allocated by PyTorch's allocator from the call of `fit` on, as a share
of the budget. Bytes allocated before there was a model are subtracted. The first call, planning,
the optimizer and everything that user code keeps are in it. *Over in* names the steps in which it
was more than 1; the first step begins with `fit`. *Bits*: every loss of every step, and parameters
and buffers in the end. Seconds are those of the first step, and of steps 2 to 6 together, of the
fitted loop and of the plain one.
"""
_COLUMNS = (
    "| loop | budget | of plain | held / budget | over in | bits | step 1 | steps 2 to 6 | |\n"
    "|---|--:|--:|--:|---|---|---|---|---|\n"
)


def document(rows: Sequence[dict[str, Any]]) -> str:
    """Return the page; of several rows of a loop the last counts."""
    newest = {row["loop"]: row for row in rows if not row["small"]}
    lines = [line(newest[name]) for name in LOOPS if name in newest]
    machines = {
        f"{row['device']}, {row['threads']} thread, PyTorch {row['torch']}, {row['steps']} steps"
        for row in newest.values()
    }
    loads = [row["load"] for row in newest.values()]
    commits = ", ".join(dict.fromkeys(row["commit"] for row in newest.values()))
    end = (
        f"\nMeasured on {'; '.join(sorted(machines))}, load of the machine {min(loads)} to "
        f"{max(loads)}, commit {commits}.\n"
    )
    return f"{_HEAD}\n{_COLUMNS}{''.join(lines)}{end}{_random_models()}"


def _random_models() -> str:
    """Return what came of whole lives of random models, by the rows of the fuzzer."""
    records = read_rows(LIVES)
    lives = [record for record in records if "seeds" in record]
    outcomes: Counter[str] = Counter()
    for record in lives:
        outcomes += Counter(record["outcomes"])
    largest = max(record["budget"] for record in records if record.get("outcome") == "error")
    return (
        f"\nIn addition, {outcomes.total():,} random models were trained, first step included, "
        "within a budget drawn between their least and the memory of plain PyTorch "
        f"(`python benchmarks/fuzz.py --lives`). {outcomes['equal']} had the bits of plain "
        f"PyTorch. {outcomes['error']} were refused before anything was exceeded, within budgets "
        f"of up to {largest:,} bytes. In most of them the state of a generator has no room while a "
        f"model is looked at. {outcomes['over budget']} were over the budget, "
        f"{outcomes['unequal']} had other bits.\n"
    )


def line(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    title = LOOPS[row["loop"]].title
    if "over_budget" not in row:
        return f"| {title} | | | | | | | | {row.get('skipped') or row.get('error')} |\n"
    budget = f"{row['budget_bytes'] / 2**20:.1f} MiB"
    times = row.get("followed", 0)
    again = f", followed {times} times" if times > 1 else ""
    advised = f" (advised{again})" if times else ""
    share = f"{row['budget_bytes'] / row['plain_peak_bytes']:.2f}{advised}"
    equal = row["losses_equal"] and row["parameters_equal"] is not False
    cells = [title, budget, share, f"{row['over_budget']:.3f}", _over(row["steps_over"])]
    cells += ["equal" if equal else "**differ**", *_seconds(row), _ended(row)]
    return f"| {' | '.join(cells)} |\n"


def _over(steps: list[int]) -> str:
    """Return the numbers of steps, those in a row as one range."""
    ranges: list[list[int]] = []
    for step in steps:
        if ranges and step == ranges[-1][-1] + 1:
            ranges[-1][1:] = [step]
        else:
            ranges.append([step])
    return ", ".join("-".join(map(str, each)) for each in ranges) or "none"


def _seconds(row: dict[str, Any]) -> tuple[str, str]:
    fitted, plain = row["fitted_s"], row["plain_s"]
    if not fitted:
        return "", ""
    later = f"{sum(fitted[1:]):.1f} / {sum(plain[1 : len(fitted)]):.1f} s"
    return f"{fitted[0]:.1f} / {plain[0]:.1f} s", later if fitted[1:] else ""


def _ended(row: dict[str, Any]) -> str:
    """Return what ended a loop before its time."""
    if not row["error"]:
        return ""
    return f"{row['error'].split(':')[0]} after {row['steps_done']} steps".replace("|", "\\|")


def main() -> None:
    """Write the page."""
    TABLE.write_text(document(read_rows(ROWS)))


if __name__ == "__main__":
    main()
