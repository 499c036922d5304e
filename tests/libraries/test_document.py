"""Every example of docs/libraries.md runs, planned for a second only, within its budget."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest

import tightfit
from support.documents import DOCS
from support.libraries import WARNINGS

pytestmark = pytest.mark.filterwarnings(*WARNINGS)

TEXT = (DOCS / "libraries.md").read_text("utf-8")
EXAMPLES = re.findall(r"## ([^\n]+)\n(?:(?!##).)*?```python\n(.*?)```", TEXT, re.DOTALL)
PACKAGES = ("transformers", "lightning", "accelerate", "peft", "torch_geometric", "diffusers")


@pytest.mark.parametrize("code", [code for _, code in EXAMPLES], ids=[n for n, _ in EXAMPLES])
def test_example(code: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in PACKAGES:
        if re.search(rf"^(import|from) {package}\b", code, re.MULTILINE):
            pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    for name in ("fit", "step"):
        quick = functools.partial(getattr(tightfit, name), costs="unit", limits=(1, 0.05))
        monkeypatch.setattr(tightfit, name, quick)
    names: dict[str, Any] = {"__name__": "example"}
    exec(code, names)
    report = tightfit.report(names["model"])
    assert report.measured is not None
    assert max(report.measured.peak_bytes, report.planned_peak_bytes) <= report.budget_bytes


def test_every_library_has_its_example() -> None:
    assert len(EXAMPLES) == len(PACKAGES)
