"""A forward may read its state in many ways: every change is noticed.

A row of the table is a call of `way`: its name, how a forward reads a number, how that number is
put into place, and how it is changed inside what is there. Each row is trained in every mode.
"""

from __future__ import annotations

import argparse
import array
import collections
import contextvars
import dataclasses
import datetime
import enum
import functools
import itertools
import operator
import os
import random
import sys
import tempfile
import threading
import time
import types
import uuid
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import tightfit

FILE = Path(tempfile.mkdtemp()) / "factor"


class Reading(nn.Module):
    """Multiplies by a number that it reads in one of the ways."""

    read: Callable[[Any], Any]

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return (self.linear(x).tanh() * type(self).read(self)).sum()


@dataclasses.dataclass
class Way:
    """A row of the table."""

    model: type[Reading]
    put: Callable[[Any, float], Any] | None
    change: Callable[[Any, float], Any] | None
    moves: bool


WAYS: dict[str, Way] = {}


def way(name, read, put, change=None, *, moves=False):
    """Add a row; one that moves is another number in every call, restarted by what puts it."""
    model = type("Net", (Reading,), {"read": staticmethod(read), "factor": 1.0})
    WAYS[name] = Way(model, put, change, moves)


def attribute(name):
    return lambda net, value: setattr(net, name, value)


def inside(name, field):
    return lambda net, value: setattr(getattr(net, name), field, value)


def item(name, key):
    return lambda net, value: getattr(net, name).__setitem__(key, value)


@dataclasses.dataclass
class Settings:
    factor: float


@dataclasses.dataclass(frozen=True)
class FrozenSettings:
    factor: float


class Slotted:
    __slots__ = ("factor",)

    def __init__(self, factor):
        self.factor = factor


class Plain:
    def __init__(self, factor):
        self.factor = factor

    @property
    def doubled(self):
        return 2 * self.factor

    def tripled(self):
        return 3 * self.factor


class Forwarding(dict):
    """Attributes are items, as those of many a library for settings; `get` is its own."""

    def get(self, name):
        return self[name]

    def __getattr__(self, name):
        return self[name]

    def __setattr__(self, name, value):
        self[name] = value


class Defaults:
    factor = 1.0


class Kind(enum.Enum):
    SMALL = 1.0
    LARGE = 2.0


FACTOR = 1.0
TABLE = {"factor": 1.0}
OBJECT = Plain(1.0)
ELSEWHERE = types.ModuleType("elsewhere_of_test_reads")
ELSEWHERE.__file__ = __file__
sys.modules[ELSEWHERE.__name__] = ELSEWHERE
ASKED: contextvars.ContextVar[float] = contextvars.ContextVar("ASKED", default=1.0)
LOCAL = threading.local()


def put_global(name):
    return lambda net, value: globals().__setitem__(name, value)


def imported(net):
    from elsewhere_of_test_reads import factor  # type: ignore

    return factor


def with_partial(net, value):
    net.a, net.ask = value, functools.partial(getattr, net)


def closure(value):
    def read():
        return value

    def change(new):
        nonlocal value
        value = new

    return types.SimpleNamespace(read=read, change=change)


def closing(value):
    return lambda: value


way("a number", lambda n: n.a, attribute("a"))
way("a text", lambda n: float(n.a), lambda n, v: setattr(n, "a", str(v)))
way("a tuple", lambda n: n.a[0], lambda n, v: setattr(n, "a", (v,)))
way("a list", lambda n: n.a[0], lambda n, v: setattr(n, "a", [v]), item("a", 0))
way("a dict", lambda n: n.a["k"], lambda n, v: setattr(n, "a", {"k": v}), item("a", "k"))
way(
    "a set",
    lambda n: sum(n.a),
    lambda n, v: setattr(n, "a", {v}),
    lambda n, v: n.a.add(v + 7),
)
way(
    "a deque",
    lambda n: n.a[-1],
    lambda n, v: setattr(n, "a", collections.deque([v], 2)),
    lambda n, v: n.a.append(v),
)
way(
    "a list of lists",
    lambda n: n.a[0][0],
    lambda n, v: setattr(n, "a", [[v]]),
    lambda n, v: n.a[0].__setitem__(0, v),
)
way(
    "a dataclass",
    lambda n: n.a.factor,
    lambda n, v: setattr(n, "a", Settings(v)),
    inside("a", "factor"),
)
way(
    "a frozen dataclass",
    lambda n: n.a.factor,
    lambda n, v: setattr(n, "a", FrozenSettings(v)),
    lambda n, v: object.__setattr__(n.a, "factor", v),
)
way(
    "dataclasses.asdict",
    lambda n: dataclasses.asdict(n.a)["factor"],
    lambda n, v: setattr(n, "a", Settings(v)),
    inside("a", "factor"),
)
way(
    "a SimpleNamespace",
    lambda n: n.a.factor,
    lambda n, v: setattr(n, "a", types.SimpleNamespace(factor=v)),
    inside("a", "factor"),
)
way(
    "an argparse.Namespace",
    lambda n: n.a.factor,
    lambda n, v: setattr(n, "a", argparse.Namespace(factor=v)),
    inside("a", "factor"),
)
way(
    "vars of a namespace",
    lambda n: vars(n.a)["factor"],
    lambda n, v: setattr(n, "a", argparse.Namespace(factor=v)),
    inside("a", "factor"),
)
way(
    "a computed name",
    lambda n: getattr(n.a, "".join(["fac", "tor"])),
    lambda n, v: setattr(n, "a", argparse.Namespace(factor=v)),
    inside("a", "factor"),
)
GETTER, ASKING = operator.attrgetter("a"), getattr
way("an attrgetter made before", lambda n: 1 * GETTER(n), attribute("a"))
way("getattr by another name", lambda n: ASKING(n, "a"), attribute("a"))
way("a partial of getattr", lambda n: n.ask("a"), with_partial)
way("__getattribute__", lambda n: n.__getattribute__("a"), attribute("a"))
way(
    "getattr with a default",
    lambda n: getattr(n.a, "factor", 1.0),
    lambda n, v: setattr(n, "a", argparse.Namespace()),
    inside("a", "factor"),
)
way(
    "an object",
    lambda n: n.a.factor,
    lambda n, v: setattr(n, "a", Plain(v)),
    inside("a", "factor"),
)
way(
    "a property of an object",
    lambda n: n.a.doubled,
    lambda n, v: setattr(n, "a", Plain(v)),
    inside("a", "factor"),
)
way(
    "a method of an object",
    lambda n: n.a.tripled(),
    lambda n, v: setattr(n, "a", Plain(v)),
    inside("a", "factor"),
)
way(
    "a bound method",
    lambda n: n.a(),
    lambda n, v: setattr(n, "a", Plain(v).tripled),
    lambda n, v: setattr(n.a.__self__, "factor", v),
)
way(
    "slots",
    lambda n: n.a.factor,
    lambda n, v: setattr(n, "a", Slotted(v)),
    inside("a", "factor"),
)
way(
    "items as attributes",
    lambda n: n.a.factor,
    lambda n, v: setattr(n, "a", Forwarding(factor=v)),
    lambda n, v: n.a.update(factor=v),
)
way(
    "an object in an object",
    lambda n: n.a.factor.factor,
    lambda n, v: setattr(n, "a", Plain(Plain(v))),
    lambda n, v: setattr(n.a.factor, "factor", v),
)
way(
    "a list of objects",
    lambda n: sum(each.factor for each in n.a),
    lambda n, v: setattr(n, "a", [Plain(v), Plain(0.5)]),
    lambda n, v: setattr(n.a[1], "factor", v),
)
way(
    "a dict of objects",
    lambda n: n.a["k"].factor,
    lambda n, v: setattr(n, "a", {"k": Plain(v)}),
    lambda n, v: setattr(n.a["k"], "factor", v),
)
way(
    "a weak reference",
    lambda n: n.a().factor,
    lambda n, v: setattr(n, "b", Plain(v)) or setattr(n, "a", weakref.ref(n.b)),
    lambda n, v: setattr(n.b, "factor", v),
)
way(
    "an array",
    lambda n: float(n.a[0]),
    lambda n, v: setattr(n, "a", numpy.array([v])),
    item("a", 0),
)
way(
    "an array as a tensor",
    lambda n: torch.as_tensor(n.a, dtype=torch.float32),
    lambda n, v: setattr(n, "a", numpy.array([v])),
    item("a", 0),
)
way(
    "a number of numpy",
    lambda n: float(n.a),
    lambda n, v: setattr(n, "a", numpy.float32(v)),
)
way(
    "a large array",
    lambda n: float(n.a[0]),
    lambda n, v: setattr(n, "a", numpy.full(1 << 20, v)),
    item("a", 0),
)
way(
    "bytes that change",
    lambda n: float(n.a[0]),
    lambda n, v: setattr(n, "a", bytearray([int(v)])),
    lambda n, v: n.a.__setitem__(0, int(v)),
)
way(
    "array.array",
    lambda n: n.a[0],
    lambda n, v: setattr(n, "a", array.array("d", [v])),
    item("a", 0),
)
way(
    "a tensor",
    lambda n: n.a,
    lambda n, v: setattr(n, "a", torch.tensor(v)),
    lambda n, v: n.a.fill_(v),
)
way(
    "a tensor as a number",
    lambda n: n.a.item(),
    lambda n, v: setattr(n, "a", torch.tensor(v)),
    lambda n, v: n.a.fill_(v),
)
way(
    "a tensor in an object",
    lambda n: n.a.factor,
    lambda n, v: setattr(n, "a", Plain(torch.tensor(v))),
    lambda n, v: n.a.factor.fill_(v),
)
way(
    "a tensor in a list",
    lambda n: n.a[0],
    lambda n, v: setattr(n, "a", [torch.tensor(v)]),
    lambda n, v: n.a.__setitem__(0, torch.tensor(v)),
)
way("a class attribute", lambda n: n.factor, lambda n, v: setattr(type(n), "factor", v))
way("an attribute that hides the class's", lambda n: n.factor, attribute("factor"))
way(
    "a class attribute of another class",
    lambda n: Defaults.factor,
    lambda n, v: setattr(Defaults, "factor", v),
)
way(
    "an attribute that hides a default",
    lambda n: n.a.factor,
    lambda n, v: setattr(n, "a", Defaults()),
    inside("a", "factor"),
)
way("a global", lambda n: FACTOR, put_global("FACTOR"))
way(
    "a global dict",
    lambda n: TABLE["factor"],
    lambda n, v: globals().__setitem__("TABLE", {"factor": v}),
    lambda n, v: TABLE.__setitem__("factor", v),
)
way(
    "a global object",
    lambda n: OBJECT.factor,
    lambda n, v: globals().__setitem__("OBJECT", Plain(v)),
    lambda n, v: setattr(OBJECT, "factor", v),
)
way("a module's global", lambda n: ELSEWHERE.factor, lambda n, v: setattr(ELSEWHERE, "factor", v))
way("an import in forward", imported, lambda n, v: setattr(ELSEWHERE, "factor", v))
way("an enum", lambda n: n.a.value, lambda n, v: setattr(n, "a", Kind(min(v, 2.0))))
way(
    "a closure",
    lambda n: n.a(),
    lambda n, v: setattr(n, "a", closing(v)),
    lambda n, v: setattr(n.a.__closure__[0], "cell_contents", v),
)
way(
    "a closure in an object",
    lambda n: n.a.read(),
    lambda n, v: setattr(n, "a", closure(v)),
    lambda n, v: n.a.change(v),
)
way(
    "a default argument",
    lambda n: n.a(),
    lambda n, v: setattr(n, "a", lambda x=v: x),
    lambda n, v: setattr(n.a, "__defaults__", (v,)),
)
way(
    "a partial",
    lambda n: n.a(),
    lambda n, v: setattr(n, "a", functools.partial(lambda o: o.factor, Plain(v))),
    lambda n, v: setattr(n.a.args[0], "factor", v),
)
way(
    "an attribute of a function",
    lambda n: n.a.factor,
    lambda n, v: setattr(n, "a", lambda: None) or setattr(n.a, "factor", v),
    inside("a", "factor"),
)
way("a context variable", lambda n: ASKED.get(), lambda n, v: ASKED.set(v))
way("what a thread keeps", lambda n: LOCAL.factor, lambda n, v: setattr(LOCAL, "factor", v))
way(
    "the environment",
    lambda n: float(os.environ["FACTOR_OF_TESTS"]),
    lambda n, v: os.environ.__setitem__("FACTOR_OF_TESTS", str(v)),
)
way(
    "another module's attribute",
    lambda n: n.linear.factor,
    lambda n, v: setattr(n.linear, "factor", Plain(v)) or setattr(n.linear, "factor", v),
)
way(
    "an object of another module",
    lambda n: n.linear.settings.factor,
    lambda n, v: setattr(n.linear, "settings", Plain(v)),
    lambda n, v: setattr(n.linear.settings, "factor", v),
)
for label, made in {
    "itertools.count": lambda: itertools.count(1),
    "a generator": lambda: (float(i) for i in range(99)),
    "an iterator": lambda: iter([1.0, 2.0, 3.0] * 9),
}.items():
    way(label, lambda n: next(n.a), lambda n, v, made=made: setattr(n, "a", made()), moves=True)
way(
    "random.Random",
    lambda n: n.a.random(),
    lambda n, v: setattr(n, "a", random.Random(0)),
    moves=True,
)
way(
    "numpy.random.Generator",
    lambda n: n.a.random(),
    lambda n, v: setattr(n, "a", numpy.random.default_rng(0)),
    moves=True,
)
way(
    "integers of random.Random",
    lambda n: n.a.randint(0, 1 << 20),
    lambda n, v: setattr(n, "a", random.Random(0)),
    moves=True,
)
way(
    "a shuffled list",
    lambda n: float(n.a.sample(range(999), 3)[0] + n.a.gauss(0, 1)),
    lambda n, v: setattr(n, "a", random.Random(0)),
    moves=True,
)
way(
    "numpy.random.RandomState",
    lambda n: n.a.rand(),
    lambda n, v: setattr(n, "a", numpy.random.RandomState(0)),
    moves=True,
)
way("random", lambda n: random.random(), lambda n, v: random.seed(v), moves=True)
way(
    "numpy.random",
    lambda n: numpy.random.rand(),
    lambda n, v: numpy.random.seed(int(v)),
    moves=True,
)
way("time", lambda n: time.time() % 1000, None, moves=True)
way("uuid", lambda n: float(uuid.uuid4().int % 10**6), None, moves=True)
way("a file", lambda n: float(FILE.read_text()), lambda n, v: FILE.write_text(str(v)))
way(
    "the date",
    lambda n: float(datetime.datetime.now().microsecond),
    None,
    moves=True,
)


class Outer(nn.Module):
    """Allows no single graph, so that what it holds is planned by itself."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.calls = []

    def forward(self, x):
        self.calls.append(1)
        return self.inner(x)


OPTIONS: dict[str, Any] = {"costs": "unit", "planner": "greedy", "cache": False}


def fitted(net):
    return tightfit.fit(net, "1GiB", **OPTIONS)


def as_step(net):
    return tightfit.step(lambda x: 2 * net(x), modules=net, budget="1GiB", **OPTIONS)


def in_parts(net):
    return tightfit.fit(Outer(net), "1GiB", **OPTIONS)


def assert_same(net: Reading, run: Callable[[Any], Any], scale: float) -> None:
    x = torch.randn(3, 4)
    expected = []
    for call in (run, lambda x: scale * type(net).forward(net, x)):
        net.zero_grad()
        loss = call(x)
        loss.backward()
        expected.append((loss.detach(), *(p.grad.clone() for p in net.parameters())))
    assert all(map(torch.equal, *expected))


def every_way_twice() -> list[tuple[str, Any, int]]:
    """Return each way fitted as a whole, and as a step or, every fourth, in parts."""
    names = [name for name, row in WAYS.items() if not row.moves]
    fitted_ways = [(name, fitted, 1) for name in names]
    others = ((in_parts, 1), (as_step, 2), (as_step, 2), (as_step, 2))
    return fitted_ways + [(name, *others[i % 4]) for i, name in enumerate(names)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name, mode, scale", every_way_twice())
def test_values_that_a_forward_reads_are_up_to_date(name, mode, scale, monkeypatch) -> None:
    row = WAYS[name]
    net = row.model()
    row.put(net, 1.0)
    run = mode(net)
    for write, value in ((row.put, 2.0), (row.change, 3.0), (row.put, 4.0), (row.change, 1.0)):
        for _ in range(2):
            assert_same(net, run, scale)
        if write is not None:
            write(net, value)
    assert_same(net, run, scale)
    row.put(net, 1.0)


@pytest.mark.parametrize("name", [name for name, row in WAYS.items() if row.moves])
def test_numbers_that_differ_in_every_call_differ_in_plans(name: str) -> None:
    row, x = WAYS[name], torch.randn(3, 4)
    net = row.model()
    found = []
    for call in (lambda x: type(net).forward(net, x), fitted(net)):
        if row.put is not None:
            row.put(net, 1.0)
        found.append([call(x).item() for _ in range(6)])
    assert len(set(found[1])) > 1
    assert row.put is None or found[0] == found[1]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [name for name, row in WAYS.items() if not row.moves])
def test_no_trace_that_was_kept_has_an_old_number(name: str) -> None:
    row = WAYS[name]
    for value in (1.0, 2.0, 3.0, 1.0):
        net = row.model()
        row.put(net, 1.0 if row.change and value == 3.0 else value)
        if row.change and value == 3.0:
            row.change(net, value)
        run = tightfit.fit(net, "1GiB", **{**OPTIONS, "cache": True})
        for _ in range(2):
            assert_same(net, run, 1)
    row.put(row.model(), 1.0)


class Logging(nn.Module):
    """Keeps what its loop gives it next to what its forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.rewards: list[float] = []
        self.global_step, self.scale, self.last, self.mask = 0, 1.0, None, torch.ones(3, 4)

    def forward(self, x):
        return (self.linear(x).tanh() * self.mask * self.scale).sum()


def test_values_that_no_forward_reads_make_no_new_plan(capsys: pytest.CaptureFixture[str]) -> None:
    plain, net = Logging(), Logging()
    net.load_state_dict(plain.state_dict())
    fitted(net)
    for number in range(6):
        x, mask = torch.randn(3, 4), torch.rand(3, 4)
        for each in (plain, net):
            each.mask = mask.clone() if number % 3 else each.mask.mul_(0.5)
            each.scale = 2.0 if number > 3 else 1.0
            each.last = each(x).detach()
            each.rewards.append(each.last.item())
            each.global_step += 1
        assert torch.equal(plain.last, net.last)
    assert capsys.readouterr().err.count("making a new plan") == 1  # when the scale has changed


@functools.cache
def _parsed(text: str) -> int:
    return len(f"{text}{uuid.uuid4()}")  # a library parses what it is given, once, under some name


class Parsing(nn.Module):
    """Asks a library that keeps what it has worked out when it is first asked."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return (self.linear(x).tanh() * _parsed("n h")).sum()


def test_values_computed_once_are_computed_before_planning() -> None:
    plain, net = Parsing(), Parsing()
    net.load_state_dict(plain.state_dict())
    fitted(net)
    x = torch.randn(3, 4)
    net(x).backward()
    plain(x).backward()
    assert torch.equal(plain.linear.weight.grad, net.linear.weight.grad)
