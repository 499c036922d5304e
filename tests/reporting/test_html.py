"""The page about a plan: its numbers are the plan's, it is one offline file, a browser draws it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.browser import browser, opened
from support.graphs import compute_lists, training_graphs, two_layers
from tightfit.api.pages import write_page
from tightfit.graph.ir import Alternative, Graph, Op, Segment, Value, Variant
from tightfit.plan import Compute, assemble, keep_everything, simulate
from tightfit.plan.explain import explain
from tightfit.plan.plan import Plan
from tightfit.reporting.html.facts import BudgetPoint, Measured, facts_of
from tightfit.reporting.html.page import Findings, plan_page
from tightfit.reporting.html.sentences import ProvenBound, summary

EVIL = "</script><script>throw 1</script><b>&"
MEASURED = Measured(
    forward_bytes=900 << 20, between_bytes=800 << 20, backward_bytes=950 << 20, after_bytes=1 << 20
)


def deep_step(layers: int) -> tuple[Graph, Plan]:
    """A chain of layers, forward and backward; every third layer is computed again."""
    size = 1 << 20
    values = [Value(id=0, name="x", size_bytes=size, role="input")]
    values += [Value(id=i, name=f"relu_{i}", size_bytes=size) for i in range(1, 2 * layers)]
    values.append(Value(id=2 * layers, name="last", size_bytes=size, fate="returned"))

    def op(number: int, module: str, reads: tuple[int, ...], segment: int) -> Op:
        way = Alternative(reads=reads, writes=(number + 1,), variants=(Variant(cost_s=1e-3),))
        return Op(
            id=number, target="aten.relu", module=module, segment=segment, alternatives=(way,)
        )

    forward = [op(i, f"blocks.{i}.act", (i,), 0) for i in range(layers)]
    backward = [
        op(layers + i, f"blocks.{layers - 1 - i}.act", (layers + i, layers - i), 1)
        for i in range(layers)
    ]
    graph = Graph(
        name=f"deep {EVIL}",
        values=tuple(values),
        ops=(*forward, *backward),
        segments=(Segment(id=0, phase="forward"), Segment(id=1, phase="backward")),
        constants_bytes={"inputs": size},
    )
    computes = [Compute(op.id) for op in forward]
    for op_ in backward:
        again = layers - (op_.id - layers) - 1
        if again % 3 == 2 and again + 1 < layers:
            computes.append(Compute(again))
        computes.append(Compute(op_.id))
    plan = assemble(graph, computes, budget_bytes=0)
    peak = simulate(graph, plan).peak_bytes
    return graph, msgspec.structs.replace(plan, budget_bytes=peak)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_what_is_held_adds_up_at_every_run(data: st.DataObject) -> None:
    graph = data.draw(training_graphs())
    plan = assemble(graph, data.draw(compute_lists(graph)), budget_bytes=0)
    facts = facts_of(graph, plan)
    result = simulate(graph, plan)
    assert max(facts.runs.held_bytes, default=graph.constant_bytes) == result.peak_bytes
    assert sum(facts.runs.again) == sum(times for _, times in result.recomputed)
    lives = facts.lives
    for run, (op, held) in enumerate(zip(facts.runs.op, facts.runs.held_bytes, strict=True)):
        alive = sum(
            size
            for size, first, last in zip(lives.size_bytes, lives.first, lives.last, strict=True)
            if first <= run <= last
        )
        if op >= 0:  # at a border, tangents come before what code outside holds has gone
            assert graph.constant_bytes + alive == held


def test_the_plain_step_is_drawn_in_its_own_order_where_a_plan_puts_an_op_off() -> None:
    graph, plan = deep_step(6)
    computes = [step for step in plan.instructions if isinstance(step, Compute)]
    last = graph.ops[0].alternatives[0].writes[0]  # a copy of it that nothing waits for
    late = msgspec.structs.replace(
        graph.ops[0],
        id=1,
        alternatives=(Alternative(reads=(last,), writes=(13,), variants=(Variant(cost_s=1e-3),)),),
    )
    moved = [msgspec.structs.replace(op, id=op.id + 1) for op in graph.ops[1:]]
    values = (*graph.values, Value(id=13, name="late", size_bytes=64, fate="returned"))
    graph = msgspec.structs.replace(graph, ops=(graph.ops[0], late, *moved), values=values)
    order = [msgspec.structs.replace(step, op=step.op + (step.op > 0)) for step in computes]
    forward = [step for step in order if step.op <= 6]
    plain = facts_of(graph, assemble(graph, keep_everything(graph), budget_bytes=0)).runs
    put_off = assemble(graph, [*forward[:6], Compute(1), *order[6:]], budget_bytes=0)
    held = facts_of(graph, put_off).runs.plain_bytes
    assert sorted(held[1:8]) == list(held[1:8])
    assert max(held) == max(plain.plain_bytes)


def test_three_sentences_say_what_was_done_and_what_it_costs() -> None:
    graph, plan = deep_step(30)
    proven = ProvenBound(0.05, "K-cut")
    held, done, cost = summary(graph, explain(plan, graph), proven=proven, measured=MEASURED)
    again = simulate(graph, plan).recomputed
    assert f"within {plan.budget_bytes / 2**20:.2f} MiB" in held
    assert "measured to hold 950.00 MiB" in held
    assert f"{len(again)} of 60 ops are computed again" in done
    assert "costs less than 5.00 % (proven by K-cut)" in cost
    graph = two_layers()
    plan = assemble(graph, keep_everything(graph), budget_bytes=5000)
    assert "Nothing is computed again" in summary(graph, explain(plan, graph))[1]


def test_a_page_of_5000_ops_is_one_offline_file_below_2_mb() -> None:
    graph, plan = deep_step(2500)
    page = plan_page(graph, plan, Findings(measured=MEASURED))
    assert len(page) < 2_000_000
    text = page.decode()
    assert "default-src 'none'" in text
    assert "Licensed to the Apache Software Foundation" in text
    assert "Copyright 2010-2016 Mike Bostock" in text  # of the parts of d3 in the library
    assert EVIL not in text


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path, Plan]]:
    graph, plan = deep_step(400)
    path = tmp_path_factory.mktemp("page") / "report.html"
    curve = [
        BudgetPoint(
            budget_bytes=plan.budget_bytes // 2, overhead=0.4, bound=0.3, status="feasible"
        ),
        BudgetPoint(budget_bytes=1 << 20, overhead=None, bound=None, status="infeasible"),
    ]
    write_page(path, graph, plan, proven=ProvenBound(0.1, "K-cut"), measured=MEASURED, curve=curve)
    with browser() as running:
        yield running, path, plan


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 390])
def test_a_browser_draws_it_in_both_themes_and_widths(
    shown: tuple[Any, Path, Plan], scheme: str, width: int
) -> None:
    running, path, _ = shown
    with opened(running, path, scheme=scheme, width=width) as (page, errors):
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.locator("canvas").count() == 4
        colours = {str(page.locator(f"#{id} canvas").screenshot()) for id in ("memory", "layout")}
        assert len(colours) == 2
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(13, 17, 23)"}[scheme]
        assert "&" in page.title()  # the evil name is text
        assert errors == []


def test_it_answers_to_keyboard_pointer_and_buttons(shown: tuple[Any, Path, Plan]) -> None:
    running, path, plan = shown
    with opened(running, path, scheme="light", width=1200) as (page, errors):
        said = page.locator("#instant")
        peak = said.inner_text()
        assert f"held {plan.budget_bytes / 2**20:.2f} MiB" in peak
        page.locator("#run").press("Home")
        page.wait_for_selector("#instant:has-text('run 1 of')")
        page.get_by_role("button", name="Next computed again").click()
        assert "computed again" in said.inner_text()
        assert "made at run" in said.inner_text()
        page.get_by_role("button", name="Peak", exact=True).click()
        assert said.inner_text() == peak
        rows = page.locator("#held tbody tr").all_inner_texts()
        assert rows[0].startswith("relu_") and rows[-1].startswith("constants")
        page.locator("#memory").hover(position={"x": 600, "y": 150})
        page.wait_for_selector("#memory .tip:has-text('plain PyTorch')")
        page.locator("#layout").hover(position={"x": 500, "y": 300})
        page.wait_for_selector("#layout .tip:has-text('made by aten.relu')")
        page.locator("#memory").click(position={"x": 300, "y": 150})
        assert said.inner_text() != peak
        window = "charts.memory.getOption().dataZoom[0]"
        page.get_by_role("button", name="Zoom in").click()
        assert page.evaluate(f"{window}.end - {window}.start") == pytest.approx(40)
        page.get_by_role("button", name="Dark").click()
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        assert errors == []


def test_every_control_can_be_reached_and_has_a_name(shown: tuple[Any, Path, Plan]) -> None:
    running, path, _ = shown
    with opened(running, path, scheme="light", width=390) as (page, errors):
        reached = []
        for _ in range(14):
            page.keyboard.press("Tab")
            reached.append(
                page.evaluate(
                    "(e => e.labels?.[0]?.innerText || e.getAttribute('aria-labelledby') || "
                    "e.innerText)(document.activeElement)"
                )
            )
        assert "Instant" in reached and "Next computed again" in reached
        assert all(reached[:10])
        levels = [
            int(tag[1])
            for tag in page.evaluate(
                "[...document.querySelectorAll('h1,h2,h3')].map(e => e.tagName)"
            )
        ]
        assert levels[0] == 1 and all(b - a <= 1 for a, b in pairwise(levels))
        unnamed = "[...document.querySelectorAll('[role=img]')].filter(e => !e.ariaLabel).length"
        assert page.evaluate(unnamed) == 0
        assert errors == []
