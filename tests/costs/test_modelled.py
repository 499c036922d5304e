"""Modelled costs follow their formulas, need no torch, and move a graph to another machine."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from tightfit.costs import MACHINES, with_costs
from tightfit.costs.cache import Cache
from tightfit.errors import BadInput
from tightfit.graph import Alternative, Device, Graph, Op, Value, Variant, validate_graph

KIB, MIB = 1 << 10, 1 << 20


def small_graph() -> Graph:
    """A convolution, a ReLU with a second alternative, and a lookup in a large table."""
    values = (
        Value(id=0, name="image", size_bytes=MIB, role="input"),
        Value(id=1, name="weight", size_bytes=64, role="parameter"),
        Value(id=2, name="convolved", size_bytes=2 * MIB + 64),
        Value(id=3, name="activated", size_bytes=2 * MIB + 64),
        Value(id=4, name="mask", size_bytes=64 * KIB),
        Value(id=5, name="table", size_bytes=100 * MIB, role="parameter"),
        Value(id=6, name="row", size_bytes=KIB),
    )
    ops = (
        Op(
            id=0,
            target="aten.convolution",
            alternatives=(Alternative(reads=(0, 1), writes=(2,), variants=(Variant(), Variant())),),
            flops=10**10,
        ),
        Op(
            id=1,
            target="aten.relu",
            alternatives=(
                Alternative(reads=(2,), writes=(3,)),
                Alternative(name="relu.mask1", reads=(2,), writes=(3, 4)),
            ),
        ),
        Op(id=2, target="aten.embedding", alternatives=(Alternative(reads=(5, 0), writes=(6,)),)),
    )
    graph = Graph(
        values=values,
        ops=ops,
        constants_bytes={"inputs": MIB, "parameters": 100 * MIB + 64},
        device=Device(kind="cpu", granularity_bytes=64),
    )
    return validate_graph(graph)


def costs(graph: Graph) -> list[list[float]]:
    return [[a.variants[0].cost_s for a in op.alternatives] for op in graph.ops]


def test_unit_costs():
    priced = with_costs(small_graph(), "unit")
    assert costs(priced) == [[1.0], [1.0, 1.0], [1.0]]
    assert priced.cost_source == "unit"
    assert priced.values == small_graph().values


def test_flops_costs_have_a_floor():
    elements = (2 * MIB + 64) // 4
    assert costs(with_costs(small_graph(), "flops")) == [
        [1e10 / 1e12],
        [elements / 1e12, (elements + 16 * KIB) / 1e12],
        [256 / 1e12],
    ]


def test_roofline_costs():
    """Operations bound the convolution; traffic the rest; a lookup does not read its table."""
    priced = with_costs(small_graph(), "p100")
    bandwidth, launch = 732e9 * 0.75, 5e-6
    row = 2 * MIB + 512  # rounded to 512 bytes
    expected = [
        [1e10 / (9.3e12 * 0.60) + launch],
        [2 * row / bandwidth + launch, (2 * row + 64 * KIB) / bandwidth + launch],
        [3 * KIB / bandwidth + launch],
    ]
    for got, wanted in zip(costs(priced), expected, strict=True):
        assert got == pytest.approx(wanted)
    assert {v.cost_s for v in priced.ops[0].alternatives[0].variants} == {costs(priced)[0][0]}


def test_a_modelled_gpu_rounds_as_its_allocator_does():
    priced = validate_graph(with_costs(small_graph(), "a100"))
    assert priced.cost_source == "roofline:a100 (estimate)"
    assert priced.device == Device(
        kind="a100", granularity_bytes=512, name="NVIDIA A100 (modelled)"
    )
    assert [v.size_bytes for v in priced.values][1:4] == [512, 2 * MIB + 512, 2 * MIB + 512]
    assert priced.constants_bytes == {"inputs": MIB, "parameters": 100 * MIB + 512}


def test_every_machine_names_its_source_and_is_faster_than_the_one_before():
    assert all("datasheet" in machine.source for machine in MACHINES.values())
    totals = [
        sum(map(sum, costs(with_costs(small_graph(), name))))
        for name in ("p100", "v100", "a100", "h100")
    ]
    assert totals == sorted(totals, reverse=True)


def test_unknown_costs_are_refused_by_name():
    with pytest.raises(BadInput, match=r"'b200' \(known: unit, flops, p100"):
        with_costs(small_graph(), "b200")


def test_modelled_costs_need_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from tightfit.costs import with_costs\n"
        "from tightfit.graph import Graph\n"
        "for source in ('unit', 'flops', 'a100'):\n"
        "    with_costs(Graph(values=(), ops=()), source)\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


def test_costs_of_this_cpu_are_measured_once(tmp_path, monkeypatch):
    monkeypatch.setenv("TIGHTFIT_CACHE_DIR", str(tmp_path))
    first = with_costs(small_graph(), "cpu")
    assert first == with_costs(small_graph(), "cpu")
    assert first.cost_source == "roofline:cpu"
    assert first.device.granularity_bytes == 64
    assert all(cost > 0 for op in costs(first) for cost in op)
    assert len(list(tmp_path.iterdir())) == 1


class Number(msgspec.Struct):
    """A record for the tests below."""

    value: int


class Text(msgspec.Struct):
    """Another one, with an incompatible field."""

    value: str


def test_the_cache_keeps_records_per_environment(tmp_path):
    cache = Cache("cpu, 1 thread", tmp_path)
    cache.put("add", Number(1))
    assert list(tmp_path.iterdir()) == []
    cache.save()
    assert Cache("cpu, 1 thread", tmp_path).get("add", Number) == Number(1)
    assert Cache("cpu, 1 thread", tmp_path).get("add", Text) is None
    assert Cache("cpu, 1 thread", tmp_path).get("mul", Number) is None
    assert Cache("cpu, 2 threads", tmp_path).get("add", Number) is None


def test_two_processes_do_not_lose_each_others_records(tmp_path):
    one, other = Cache("cpu", tmp_path), Cache("cpu", tmp_path)
    one.put("add", Number(1))
    other.put("mul", Number(2))
    one.save()
    other.save()
    both = Cache("cpu", tmp_path)
    assert (both.get("add", Number), both.get("mul", Number)) == (Number(1), Number(2))


@pytest.mark.parametrize("content", [b"", b"{", b'{"a": 1}', b"\xff\xfe", b'{"a": {"used": "x"}}'])
def test_a_damaged_cache_is_an_empty_one(tmp_path, content):
    cache = Cache("cpu", tmp_path)
    cache.path.write_bytes(content)
    cache = Cache("cpu", tmp_path)
    assert cache.get("add", Number) is None
    cache.put("add", Number(1))
    cache.save()
    assert Cache("cpu", tmp_path).get("add", Number) == Number(1)


def test_the_cache_is_bounded_and_keeps_what_was_used_last(tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("tightfit.costs.cache.time.time", lambda: now[0])
    for number in range(6):
        now[0] += 1
        cache = Cache("cpu", tmp_path, most_entries=3)
        cache.get("0", Number)
        cache.put(str(number), Number(number))
        cache.save()
    kept = [n for n in range(6) if Cache("cpu", tmp_path).get(str(n), Number)]
    assert kept == [0, 4, 5]


def test_an_unwritable_folder_is_no_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    cache = Cache("cpu", tmp_path / "file")
    cache.put("add", Number(1))
    cache.save()
    assert cache.get("add", Number) == Number(1)
