"""The command line: one file per command, `options` and `output` for the parts they share.

In: words. Out: text or one JSON object, and an exit code. May import api, studies, reporting,
planners, plan, graph, costs, and capture for annotations; commands on files work without PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 fits, 3 infeasible, 2 bad input.

    `arguments`: the words after ``tightfit``; None: those of this process.
    """
    from tightfit.cli.app import run

    return run(arguments)
