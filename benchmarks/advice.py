"""What is refused, what is advised and what is called proven, against what really works.

    python benchmarks/advice.py                         # all loops, small, a few minutes each
    python benchmarks/advice.py autoencoder --steps 8
    python benchmarks/advice.py drawn_0 drawn_1         # drawn at random by these seeds
    python benchmarks/advice.py drawn_in_graphs_0       # the same, of a model in several graphs

Each loop of `training_loops` runs plainly, then fitted within exactly what plain PyTorch took, and
within less and less until it is refused: the least budget that works is found by bisection. Then it
is fitted within `TOO_LITTLE` of that least, and what the errors advise is followed. A row holds
plain's peak, whether a budget of it is kept to, the least that works, the largest number that any
error called proven, the first budget that was advised, and how many rounds it took. Rows are
appended to ``benchmarks/results/advice.jsonl``; `--summary` prints them as a table.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.loops import in_processes
from benchmarks.rows import append_rows, read_rows
from benchmarks.training import circumstances
from benchmarks.training_loops import IN_GRAPHS, LIFETIMES, LOOPS, Life, Loop, loop_named

__all__ = ["TOO_LITTLE", "found_out"]

RESULTS = Path(__file__).parent / "results" / "advice.jsonl"
TOO_LITTLE = 0.9
_MOST_ROUNDS = 6
_LONGEST_S = 300.0


def main(words: Sequence[str] | None = None) -> None:
    """Run the loops asked for; append the row of each as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    every = {**IN_GRAPHS, **LIFETIMES, **LOOPS}
    parser.add_argument("loops", nargs="*", metavar="LOOP", help=", ".join(every))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--full", action="store_true", help="models as large as in docs/loops.md")
    parser.add_argument("--resolution", type=float, default=0.02, help="of the least that works")
    parser.add_argument("--summary", action="store_true", help="print the rows that are there")
    options = parser.parse_args(words)
    if options.summary:
        print(summary(read_rows(RESULTS)))
        return
    for name in options.loops or every:
        row = {**circumstances(1, rounds=1), **row_of(loop_named(name), options)}
        append_rows(RESULTS, row)
        print(_line(row), flush=True)


def row_of(loop: Loop, options: argparse.Namespace) -> dict[str, Any]:
    """Run a loop plainly and within budgets; return what was found."""
    steps, small = options.steps, not options.full
    row: dict[str, Any] = {"loop": loop.name, "small": small, "steps": steps}
    missing = [name for name in loop.packages if importlib.util.find_spec(name) is None]
    if missing:
        return {**row, "skipped": f"{', '.join(missing)} is not installed"}
    plain = in_processes(loop, None, steps, small)
    if plain.error:
        return {**row, "skipped": f"plain PyTorch: {plain.error}"}
    within = lambda budget: in_processes(loop, budget, steps, small, _LONGEST_S)  # noqa: E731
    return {**row, **found_out(plain, within, options.resolution)}


def found_out(
    plain: Life, within: Callable[[int], Life], resolution: float = 0.02
) -> dict[str, Any]:
    """Return what holds of budgets for a loop."""
    proven = [0]

    def works(budget_bytes: int) -> Life:
        life = within(budget_bytes)
        named = re.findall(r"proven: none fits less than (\d+)", life.error)
        proven.extend(int(number) for number in named)
        return life

    most = plain.whole_bytes
    at_plain = works(most)
    row: dict[str, Any] = {
        "plain_peak_bytes": most,
        "holds_at_plain": _holds(at_plain, plain),
        "error_at_plain": at_plain.error[:300],
    }
    upper = most if row["holds_at_plain"] else None
    lower = plain.found_bytes
    while upper is not None and upper - lower > resolution * upper:
        middle = (lower + upper) // 2
        if _holds(works(middle), plain):
            upper = middle
        else:
            lower = middle
    start = int(TOO_LITTLE * (upper or most))
    first, rounds, found = None, 0, works(start)
    while found.error and found.advised_bytes and rounds < _MOST_ROUNDS:
        first = first or found.advised_bytes
        rounds += 1
        found = works(found.advised_bytes)
    return {
        **row,
        "least_bytes": upper,
        "proven_bytes": max(proven),
        "too_little_bytes": start,
        "first_try_bytes": first,
        "rounds": rounds,
        "ends_well": _holds(found, plain),
    }


def _holds(fitted: Life, plain: Life) -> bool:
    alike = fitted.losses == plain.losses and fitted.parameters == plain.parameters
    return not fitted.error and alike and fitted.largest_bytes <= (fitted.budget_bytes or 0)


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Return the newest row of each loop as a table."""
    newest = {(row["loop"], row["small"]): row for row in rows}
    return "\n".join(map(_line, newest.values()))


def _line(row: dict[str, Any]) -> str:
    if "skipped" in row:
        return f"{row['loop']:26} {row['skipped'][:120]}"
    plain, least = row["plain_peak_bytes"], row["least_bytes"]
    shares = {
        "proven": row["proven_bytes"],
        "least": least,
        "first try": row["first_try_bytes"],
    }
    listed = ", ".join(f"{k} {v / plain:.3f}" if v else f"{k} -" for k, v in shares.items())
    return (
        f"{row['loop']:26} of plain's {plain / 2**20:.2f} MiB: {listed}; {row['rounds']} rounds; "
        f"at plain's peak {'holds' if row['holds_at_plain'] else row['error_at_plain'][:150]}"
    )


if __name__ == "__main__":
    main()
