"""The demonstration's rows and table, on a small model of the zoo."""

from __future__ import annotations

import json

import pytest

from tightfit.cli import main
from tightfit.studies import demonstration as demo

SMALL = (demo.DemonstratedModel("mobilenet_v2", (0.7,), {"batch": 4, "size": 64}),)


@pytest.mark.usefixtures("short_mobilenet")
def test_demonstration(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    proofs = demo.demonstrate(SMALL, rounds=1, planning_s=1.0)
    monkeypatch.setattr(demo, "demonstrate", lambda *_, **__: proofs)
    assert main(["demo", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["proofs"][0]
    assert row["bitwise"] and row["holds"] and row["model"] == "mobilenet_v2"
    assert row["measured_peak_bytes"] <= row["budget_bytes"] < row["eager_peak_bytes"]
    assert main(["demo"]) == 0
    words = capsys.readouterr().out.split()
    assert {"mobilenet_v2", "extra", "bitwise"} < set(words)
    assert " ".join(words).count("1 of 1") == 2
