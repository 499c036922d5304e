"""A trace of an earlier process serves where all that it rests on is the same, and nowhere else."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
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
from tightfit.capture.capture import capture
from tightfit.capture.captured import Captured
from tightfit.capture.recall.codes import digest_of
from tightfit.capture.traced_call import TracedCall
from tightfit.errors import CaptureError

NEVER_KEPT = {
    "opaque modules",
    "opaque modules under autocast",
    "generators of its own",
    "a branch on data inside a module",
    "recurrent modules",
    "packed sequences",
}
"""What runs eagerly as one op is measured in each process, and what data decide is asked in it."""


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """Yield a list that grows with every trace that is made; nothing is kept when it begins."""
    monkeypatch.setenv("TIGHTFIT_CACHE_DIR", str(tmp_path))
    made: list[str] = []
    plain = capturing._traced

    def noted(*args: Any, **kwargs: Any) -> Any:
        made.append("a trace")
        return plain(*args, **kwargs)

    monkeypatch.setattr(capturing, "_traced", noted)  # before anything that a trace runs is heard
    yield made


def captured(model: nn.Module, *inputs: Any, function: Any = None) -> Captured:
    call = TracedCall(function or model.forward, {"model": model}, inputs, {})
    return capture(call, recalls=True)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_a_recalled_step_is_the_one_that_was_traced(case: Case, traced: list[str]) -> None:
    model, inputs = case.model(), case.inputs()
    around = torch.autocast("cpu", torch.bfloat16) if case.autocast else contextlib.nullcontext()
    with around:
        try:
            first = captured(model, *inputs)
        except CaptureError:
            pytest.skip("is captured only with what `fit` finds out before")
        count = len(traced)
        again = captured(case.model(), *inputs)
    recalled = len(traced) == count
    assert recalled or case.name in NEVER_KEPT
    if recalled:
        for one, other in zip(described(again), described(first), strict=True):
            assert one == other


# -- whatever differs, the step is traced anew ----------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        self.act = F.relu

    def forward(self, x):
        return self.inner(self.act(self.other(self.norm(self.one(x))))).sum()


class OtherNet(Net):
    def forward(self, x):
        return self.inner(self.act(self.other(self.norm(self.one(x))))).mean()


class Doubling(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def tie(net: Net) -> None:
    net.other.weight = net.one.weight


def share_storage(net: Net) -> None:
    both = torch.randn(8, 4)
    net.one.weight, net.other.weight = nn.Parameter(both[:4]), nn.Parameter(both[4:])


def doubled(net: Net) -> None:
    plain = net.one.forward
    net.one.forward = lambda x: 2 * plain(x)


def hooked(net: Net) -> None:
    net.one.register_forward_hook(lambda module, args, output: 2 * output)


DIFFERENCES: dict[str, Callable[[Net], Any]] = {
    "a class": lambda net: setattr(net, "one", Doubling(4, 4)),
    "a function": lambda net: setattr(net, "act", torch.tanh),
    "a lambda": lambda net: setattr(net, "act", lambda x: x * 2),
    "evaluation": lambda net: net.norm.eval(),
    "a rate": lambda net: setattr(net.inner[1], "p", 0.25),
    "a frozen weight": lambda net: net.one.weight.requires_grad_(False),
    "a precision": lambda net: net.double(),
    "a missing bias": lambda net: setattr(net.one, "bias", None),
    "a tied weight": tie,
    "weights in one storage": share_storage,
    "a forward of one module": doubled,
    "a hook": hooked,
    "a further module": lambda net: net.inner.append(nn.Tanh()),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_model_that_differs_is_traced(name: str, traced: list[str]) -> None:
    x = torch.randn(3, 4)
    captured(Net(), x)
    captured(Net(), x)
    assert len(traced) == 1
    for count in (2, 2):
        net = Net()
        DIFFERENCES[name](net)
        captured(net, x.to(next(net.parameters()).dtype))
        assert len(traced) >= count


def two_forms(net: Net) -> list[Callable[[Any], Any]]:
    return [lambda x: net(x) * 1, lambda x: net(x) * 2]


def test_another_function_of_the_same_modules_is_traced(traced: list[str]) -> None:
    x, net = torch.randn(3, 4), Net()
    for function in two_forms(net) * 2:
        captured(net, x, function=function)
    assert len(traced) == 2


def scaled(factor: float) -> Callable[[Any], Any]:
    return lambda x: factor * x


def test_functions_of_the_same_code_are_told_apart(traced: list[str]) -> None:
    """What they close over is swapped: neither code nor what is closed over differs as a set."""

    class Two(nn.Module):
        def __init__(self, first: float, second: float) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.first, self.second = scaled(first), scaled(second)

        def forward(self, x):
            return self.second(self.first(self.linear(x)).tanh()).sum()

    x = torch.randn(3, 4)
    for pair in ((2.0, 3.0), (3.0, 2.0), (2.0, 3.0)):
        torch.manual_seed(0)
        net = Two(*pair)
        step = captured(net, x)
        numbers = [a for n in step.joint.module.graph.nodes for a in n.args if type(a) is float]
        assert numbers[:2] == list(pair)
    assert len(traced) == 2


@torch.no_grad()
def ones(x):
    return torch.ones_like(x)


@torch.no_grad()
def twos(x):
    return 2 * torch.ones_like(x)


HELPER = ones


class Helped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return (self.linear(x) * HELPER(x)).sum()


def test_decorated_functions_are_told_apart(
    traced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's own wrapper around them is one and the same code."""
    net, x = Helped(), torch.randn(3, 4)
    captured(net, x)
    captured(Helped(), x)
    assert len(traced) == 1
    monkeypatch.setitem(globals(), "HELPER", twos)
    captured(Helped(), x)
    assert len(traced) == 2


SURROUNDINGS: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "autocast": lambda _: torch.autocast("cpu", torch.bfloat16),
    "a function put in the place of PyTorch's": lambda patch: patch.setattr(
        F, "relu", lambda x, inplace=False: torch.tanh(x)
    ),
    "a method put in the place of PyTorch's": lambda patch: patch.setattr(
        nn.Linear, "forward", lambda self, x: F.linear(x, self.weight) * 2
    ),
    "a class's forward": lambda patch: patch.setattr(Net, "forward", OtherNet.forward),
    "a setting": lambda _: nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH),
    "the precision of new tensors": lambda patch: default_dtype(torch.float64),
}


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_what_lies_around_a_model_counts(
    name: str, traced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, net = torch.randn(3, 4), Net()
    captured(net, x)
    with monkeypatch.context() as patch:
        around = SURROUNDINGS[name](patch)
        with around if around is not None else contextlib.nullcontext():
            captured(net, x)
    assert len(traced) == 2
    captured(net, x)
    assert len(traced) == 2


class Asking(nn.Module):
    """Asks what another process is told otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).sum() * (2 if Path("double").exists() else 1)


def test_what_asks_of_files_is_not_kept(traced: list[str]) -> None:
    for _ in range(2):
        captured(Asking(), torch.randn(3, 4))
    assert len(traced) == 2


# -- files ----------------------------------------------------------------------------------------


def kept_files(folder: Path) -> list[Path]:
    return sorted((folder / "traces").glob("*.gz"))


def test_a_damaged_file_is_as_none(traced: list[str], tmp_path: Path) -> None:
    x, net = torch.randn(3, 4), Net()
    captured(net, x)
    (file,) = kept_files(tmp_path)
    for content in (b"", b"nonsense", file.read_bytes()[:-20]):
        file.write_bytes(content)
        count = len(traced)
        captured(net, x)
        assert len(traced) == count + 1
        captured(net, x)
        assert len(traced) == count + 1


def test_nothing_is_kept_without_a_cache(traced: list[str], tmp_path: Path) -> None:
    net = tightfit.fit(Net(), "1MiB", costs="unit", cache=False)
    net(torch.randn(3, 4)).backward()
    assert traced and not kept_files(tmp_path)


def test_code_is_told_by_what_it_does() -> None:
    texts = ("def f(x):\n    return x + 1\n", "\n\ndef f(x):\n    # more\n    return x + 1\n")
    codes = [
        compile(text, name, "exec").co_consts[0] for text, name in zip(texts, "ab", strict=True)
    ]
    other = compile(texts[0].replace("1", "1.0"), "a", "exec").co_consts[0]
    assert digest_of(codes[0]) == digest_of(codes[1]) != digest_of(other)


# -- really in other processes --------------------------------------------------------------------

PROGRAM = """
import sys
import torch
from torch import nn
import tightfit
from tightfit.capture import capture as capturing

SETTINGS = {"names": {"a", "b", "c", "d"}, "factor": 2.0}
count, plain = [], capturing._traced
capturing._traced = lambda *a, **k: count.append(1) or plain(*a, **k)

def scaled(x):
    return x * SETTINGS["factor"]

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x):
        return scaled(self.norm(self.linear(x))).square().mean() * len(SETTINGS["names"])

torch.manual_seed(0)
net = Net()
tightfit.fit(net, "1MiB", costs="unit")
loss = net(torch.randn(4, 8))
loss.backward()
print(len(count), loss.item(), net.linear.weight.grad.sum().item())
"""


def run(folder: Path, text: str) -> list[str]:
    (folder / "program.py").write_text(textwrap.dedent(text))
    environment = {**os.environ, "TIGHTFIT_CACHE_DIR": str(folder / "cache")}
    environment.pop("PYTHONHASHSEED", None)
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_another_process_recalls_what_is_the_same(tmp_path: Path) -> None:
    first, *results = run(tmp_path, PROGRAM)
    assert first == "1"
    moved = PROGRAM.replace("def scaled", "# a comment\n\ndef scaled")
    assert run(tmp_path, moved) == ["0", *results]
    for old, new in (('"factor": 2.0', '"factor": 3.0'), ("x * S", "x / S"), ('"a", ', "")):
        count, *others = run(tmp_path, PROGRAM.replace(old, new))
        assert count == "1" and others != results
    assert run(tmp_path, PROGRAM) == ["0", *results]
