"""Every example runs as it stands and stays within its budget."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
REPORTED = re.compile(r"budget ([\d.]+) MiB: planned peak ([\d.]+) MiB .*measured ([\d.]+) MiB")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example(path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-W", "error", str(path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    report = REPORTED.search(result.stdout)
    assert report is not None, result.stdout
    budget, planned, measured = (float(number) for number in report.groups())
    assert measured <= planned <= budget
