"""Reports stay readable: repeated layers are grouped and tables are bounded."""

from __future__ import annotations

from support.graphs import two_layers
from tightfit.graph import Alternative, Graph, Op, Segment, Value
from tightfit.plan import assemble, keep_everything
from tightfit.plan.explain import explain
from tightfit.reporting.groups import group_names
from tightfit.reporting.text import render_explanation, render_graph, render_table


def test_repeated_layers_share_a_group_and_single_ones_keep_their_name() -> None:
    groups = group_names(["layer1.0.conv", "layer1.1.conv", "layer2.0.conv", "head.0", "stem"])
    assert groups == {
        "layer1.0.conv": "layer1.*.conv",
        "layer1.1.conv": "layer1.*.conv",
        "layer2.0.conv": "layer2.0.conv",
        "head.0": "head.0",
        "stem": "stem",
    }


def test_a_table_is_aligned() -> None:
    assert render_table(["name", "bytes"], [("relu", "4 B"), ("convolution", "12 B")]) == (
        "name         bytes\nrelu           4 B\nconvolution   12 B"
    )


def chain(layers: int, module: str) -> Graph:
    """A forward chain whose values are all returned."""
    return Graph(
        values=(
            Value(id=0, name="x", size_bytes=1, role="input"),
            *(
                Value(id=i, name=f"relu_{i}", size_bytes=1024, fate="returned")
                for i in range(1, layers + 1)
            ),
        ),
        ops=tuple(
            Op(
                id=i,
                target="aten.relu",
                module=module.format(i),
                alternatives=(Alternative(reads=(i,), writes=(i + 1,)),),
            )
            for i in range(layers)
        ),
        segments=(Segment(id=0, phase="forward"),),
        constants_bytes={"inputs": 1},
    )


def shown(graph: Graph) -> list[str]:
    plan = assemble(graph, keep_everything(graph), budget_bytes=1 << 30)
    return render_explanation(explain(plan, graph)).splitlines()


def test_a_hundred_layers_are_one_row_and_a_hundred_modules_are_a_dozen() -> None:
    rows = [line.split() for line in shown(chain(100, "layer.{}"))]
    assert ["layer.*", "relu", "100", "100.00", "KiB"] in rows
    lines = shown(chain(100, "layer{}"))
    assert ["others", "88", "88.00", "KiB"] in [line.split() for line in lines]
    assert len(lines) < 30


def test_a_graph_is_summed_up() -> None:
    graph = two_layers()
    plan = assemble(graph, keep_everything(graph), budget_bytes=5000)
    text = render_graph(graph, explain(plan, graph))
    assert "3 forward, 4 backward; 0 with alternatives, 0 pinned" in text
    assert "constants  2.05 KiB: parameters 1.95 KiB, inputs 100 B" in text
    assert "second  gradient of second.weight      1  1000 B" in text
