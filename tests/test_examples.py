"""Every example runs as it stands and stays within its budget."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[1] / "examples"
FACTORIES = {"llama7b.py"}
RECORDED = {"train_over_trees.py"}  # tests/online
EXAMPLES = sorted(path for path in FOLDER.glob("*.py") if path.name not in FACTORIES | RECORDED)
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


def test_llama_is_checked_without_its_memory() -> None:
    code = (
        "import resource, tightfit\n"
        "from tightfit.planners.base import Limits\n"
        f"found = tightfit.check({str(FOLDER / 'llama7b.py')!r} + ':llama7b', batch=4,\n"
        "    budget='80GiB', costs='a100', limits=Limits(seconds=2))\n"
        "assert found.fits and 25 << 30 < found.graph.constant_bytes < 41 << 30\n"
        "assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2 << 20  # KiB\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
