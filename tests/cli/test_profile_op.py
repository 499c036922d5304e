"""The ways to compute an op, measured and compared with the default."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.pictures import texts_in
from tightfit.cli import main

SMALL = Path(__file__).parent.parent / "support" / "small.py"


def test_each_way_has_its_time_its_workspace_and_what_it_reads(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["profile-op", f"{SMALL}:pooled"]
    assert main([*words, "aten.max_pool2d_with_indices_backward", "--json"]) == 0
    ways = json.loads(capsys.readouterr().out)["ways"]
    default, other, places = ways[:3]
    assert places["target"] == "max_pool.offsets" and places["op"] != default["op"]
    assert (default["alternative"], other["alternative"]) == ("default", "max_pool.from_offsets")
    assert 8 * other["kept_bytes"] == default["kept_bytes"]
    assert min(way["cost_s"] for way in ways) > 0 and all(way["is_kept"] for way in ways)
    assert len({way["op"] for way in ways}) == len(ways) // 3 * 2  # calls that are alike: once
    assert main([*words, "aten.max_pool2d_with_indices_backward:pool"]) == 0
    assert "max_pool.from_offsets" in capsys.readouterr().out
    picture = tmp_path / "ways.svg"
    operator = "aten.max_pool2d_with_indices_backward:pool"
    assert main([*words, operator, "-o", str(picture)]) == 0
    assert texts_in(picture.read_bytes()).keys() >= {"default", "max_pool.from_offsets"}
    capsys.readouterr()
    assert main([*words, "pooling"]) == 2
    assert "aten.convolution_backward" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("operator", "shown"),
    [
        ("aten.nll_loss_forward", {"linear_cross_entropy.by_rows", "linear_cross_entropy.scaled"}),
        ("aten._scaled_dot_product_flash_attention_for_cpu", {"attention.formula"}),
        ("aten.native_layer_norm_backward", {"layer_norm.from_output"}),
    ],
)
def test_what_is_replaced_together_is_shown_together(operator, shown, capsys) -> None:
    assert main(["profile-op", f"{SMALL}:tokens", operator, "--json"]) == 0
    ways = json.loads(capsys.readouterr().out)["ways"]
    assert {way["alternative"] for way in ways if way["is_kept"]} >= {"default"} | shown


def test_a_plan_and_a_page_say_what_the_next_exactness_gains(capsys, tmp_path) -> None:
    model = f"{Path(__file__).parent.parent / 'support' / 'small.py'}:tokens"
    words = ["plan", model, "--budget-ratio", "0.6", "--time-limit", "1", "--next-exactness"]
    assert main(words) in (0, 3)
    assert "exactness rounding" in capsys.readouterr().out
    assert main([*words, "--exactness", "rounding", "--json"]) in (0, 3)
    found = json.loads(capsys.readouterr().out)
    assert found["next_exactness"] == "lossy" and "next_overhead" in found
    assert main([*words, "--exactness", "lossy"]) == 2
    assert "no class is less exact than lossy" in capsys.readouterr().err
    page = tmp_path / "page.html"
    few = ["--budget-ratio", "0.9", "--time-limit", "1", "--budgets", "none", "-o", str(page)]
    assert main(["report", model, *few]) == 0
    assert "With alternatives of exactness rounding" in page.read_text("utf-8")
