"""The trace of a handed graph is stored, and serves where graph and inputs are the same again."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tightfit
from support.captured import described
from support.models import CASES, Case
from support.precision import default_dtype
from tightfit.capture import capture as capturing
from tightfit.capture import stored
from tightfit.capture.captured import Captured
from tightfit.capture.recall.recent import RecentTraces
from tightfit.errors import CaptureError
from tightfit.execution.attach import attached

pytestmark = [
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True"),
    pytest.mark.filterwarnings("ignore:hooks on module"),
]

NEVER_STORED = {
    "opaque modules",
    "opaque modules under autocast",
    "generators of its own",
    "recurrent modules",
    "a recurrent module of computed weights",
}
"""What runs eagerly as one op is measured in each process."""


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Return a list that grows with every trace that is made; nothing is stored when it begins.

    As if each model were of another process: only files are looked at.
    """
    monkeypatch.setattr(stored, "_RECENT", RecentTraces(most_bytes=0))
    monkeypatch.setenv("TIGHTFIT_CACHE_DIR", str(tmp_path))
    made: list[str] = []
    plain = capturing._traced

    def noted(*args: Any) -> Any:
        made.append("a trace")
        return plain(*args)

    monkeypatch.setattr(capturing, "_traced", noted)
    return made


def captured(model: nn.Module, *inputs: Any) -> list[Captured]:
    """Return the steps that are captured of a model that was not fitted before."""
    torch._dynamo.reset()
    fitted = tightfit.fit(model, "1GiB", costs="unit")
    tightfit.prepare(fitted, *inputs)
    session = attached(fitted)
    assert session is not None
    return [one.captured for one in session.specialisations]  # type: ignore[attr-defined]


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_a_stored_step_is_the_one_that_was_traced(case: Case, traced: list[str]) -> None:
    around = torch.autocast("cpu", torch.bfloat16) if case.autocast else contextlib.nullcontext()
    inputs = case.inputs()
    with around:
        try:
            first = captured(case.model(), *inputs)
        except CaptureError:
            pytest.skip("is no single graph")
        count = len(traced)
        again = captured(case.model(), *inputs)
    is_stored = len(traced) == count
    assert is_stored != (case.name in NEVER_STORED)
    for one, other in zip(first, again, strict=True) if is_stored else ():
        for mine, reference in zip(described(other), described(one), strict=True):
            assert mine == reference


# -- whatever differs, the step is traced again ---------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        self.act: Callable[[Any], Any] = F.relu
        self.constant = [1.0, 2.0]

    def forward(self, x):
        scale = torch.tensor(self.constant).sum()
        return self.inner(self.act(self.other(self.norm(self.one(x))))).sum() * scale


def tie(net: Net) -> None:
    net.other.weight = net.one.weight


def share_storage(net: Net) -> None:
    both = torch.randn(8, 4)
    net.one.weight, net.other.weight = nn.Parameter(both[:4]), nn.Parameter(both[4:])


def swap(net: Net) -> None:
    net.one, net.other = net.other, net.one
    net.one.register_buffer("extra", torch.zeros(1))


DIFFERENCES: dict[str, Callable[[Net], Any]] = {
    "a function": lambda net: setattr(net, "act", torch.tanh),
    "a constant": lambda net: setattr(net, "constant", [1.0, 3.0]),
    "evaluation": lambda net: net.norm.eval(),
    "a rate": lambda net: setattr(net.inner[1], "p", 0.25),
    "a frozen weight": lambda net: net.one.weight.requires_grad_(False),
    "a precision": lambda net: net.double(),
    "a missing bias": lambda net: setattr(net.one, "bias", None),
    "a tied weight": tie,
    "weights in one storage": share_storage,
    "a further buffer": swap,
    "a hook": lambda net: net.one.register_forward_hook(lambda m, args, output: 2 * output),
    "a further module": lambda net: net.inner.append(nn.Tanh()),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_model_that_differs_is_traced(name: str, traced: list[str]) -> None:
    x = torch.randn(3, 4)
    captured(Net(), x)
    captured(Net(), x)
    assert len(traced) == 1
    net = Net()
    DIFFERENCES[name](net)
    captured(net, x.to(next(net.parameters()).dtype))
    assert len(traced) == 2


SURROUNDINGS: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "a setting": lambda: nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH),
    "the precision of new tensors": lambda: default_dtype(torch.float64),
}


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_surroundings_of_a_model_count(name: str, traced: list[str]) -> None:
    x = torch.randn(3, 4)
    captured(Net(), x)
    with SURROUNDINGS[name]():
        captured(Net(), x)
    assert len(traced) == 2
    captured(Net(), x)
    assert len(traced) == 2


def test_functions_in_the_place_of_pytorchs_are_never_stored(
    traced: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What such a function closes over is in no graph."""
    plain = F.layer_norm
    monkeypatch.setattr(F, "layer_norm", lambda *args, **kwargs: 2 * plain(*args, **kwargs))
    for _ in range(2):
        captured(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), torch.randn(3, 4))
    assert len(traced) == 2 and not stored_files(tmp_path)


# -- files ----------------------------------------------------------------------------------------


def stored_files(folder: Path) -> list[Path]:
    return sorted((folder / "traces").glob("*.handed.gz"))


def test_a_damaged_file_is_as_none(traced: list[str], tmp_path: Path) -> None:
    x = torch.randn(3, 4)
    captured(Net(), x)
    (file,) = stored_files(tmp_path)
    for content in (b"", b"nonsense", file.read_bytes()[:-20]):
        file.write_bytes(content)
        count = len(traced)
        captured(Net(), x)
        captured(Net(), x)
        assert len(traced) == count + 1


def test_nothing_is_stored_without_a_cache(traced: list[str], tmp_path: Path) -> None:
    net = tightfit.fit(Net(), "1MiB", costs="unit", cache=False)
    net(torch.randn(3, 4)).backward()
    assert traced and not stored_files(tmp_path)


# -- in one process -------------------------------------------------------------------------------


def test_a_model_that_is_fitted_again_takes_no_trace(
    traced: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "_RECENT", RecentTraces(most_bytes=1 << 20))
    plain, x = Net(), torch.randn(3, 4)
    found = []
    for budget in (None, "1MiB", "2MiB"):
        net = copy.deepcopy(plain)
        if budget is not None:
            tightfit.fit(net, budget, costs="unit", cache=False)
        torch.manual_seed(0)
        net(x).backward()
        found.append([p.grad for p in net.parameters()])
    assert len(traced) == 1 and not stored_files(tmp_path)
    assert all(map(torch.equal, [*found[1], *found[2]], [*found[0], *found[0]]))
    other = copy.deepcopy(plain)
    tie(other)
    captured(other, x)
    assert len(traced) == 2


def test_traces_that_were_not_used_for_long_make_room() -> None:
    recent = RecentTraces(most_bytes=10)
    recent.keep("a", b"1234")
    recent.keep("b", b"1234")
    recent.keep("a", b"12345")
    assert recent.find("b") and recent.find("a")
    recent.keep("c", b"12345")
    assert [recent.find(key) for key in "abc"] == [b"12345", None, b"12345"]
    recent.keep("d", b"of more than all room")
    assert not any(map(recent.find, "abcd"))
