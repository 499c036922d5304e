"""What holds for every test."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tightfit.session.memory import account
from tightfit.torch_private.storages import free_failed_backward
from tightfit.zoo import mobilenet

COMPILED = Path(__file__).parent.parent / "build" / "online_core"
IMPORTED_BY_TRACING = ("torch._dynamo", "torch._inductor.utils", "torch._functorch.aot_autograd")

settings.register_profile("any machine", deadline=None)  # no test is about how long it takes
settings.load_profile("any machine")


@pytest.fixture(scope="session", autouse=True)
def own_caches() -> Iterator[None]:
    """Keep costs and plans of the tests out of the user's cache; what is compiled is kept.

    A search in the background may still write when the tests have ended.
    """
    before = os.environ.get("TIGHTFIT_CACHE_DIR")
    COMPILED.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix="tightfit-tests-", ignore_cleanup_errors=True
    ) as folder:
        (Path(folder) / COMPILED.name).symlink_to(COMPILED)
        os.environ["TIGHTFIT_CACHE_DIR"] = folder
        yield
        if before is None:
            del os.environ["TIGHTFIT_CACHE_DIR"]
        else:
            os.environ["TIGHTFIT_CACHE_DIR"] = before


@pytest.fixture(autouse=True)
def alone() -> None:
    """Let models that earlier tests have left limit nothing: budgets of several are one limit."""
    for left in list(account._LIMITERS):
        left.set_limit(None)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Dynamo remembers compiled frames for a whole process: a test begins without any.

    After many compilations of one class it leaves its forward alone, whoever asked.
    """
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def short_mobilenet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let MobileNets have five of their blocks, in tests of what is done with any model."""
    separable = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1))
    monkeypatch.setattr(mobilenet, "_SEPARABLE", separable)
    inverted = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 2, 2))
    monkeypatch.setattr(mobilenet, "_INVERTED", inverted)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--sweep`: all cases of batteries of which continuous integration runs a part."""
    parser.addoption("--sweep", action="store_true", help="all cases of tests marked `one_in`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out cases of tests marked `one_in(n)` but every n-th; begin with slow tests.

    One that came last would have a worker for itself, and the other would wait.
    """
    if not config.getoption("--sweep"):
        _leave_out(config, items)
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def _leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    seen: Counter[str] = Counter()
    kept, left_out = [], []
    for item in items:
        mark = item.get_closest_marker("one_in")
        place = seen[item.nodeid.partition("[")[0]]
        seen[item.nodeid.partition("[")[0]] += 1
        (left_out if mark is not None and place % mark.args[0] else kept).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)


_HAS_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note that a test has failed."""
    report = yield
    if report.failed:
        item.config.stash[_HAS_FAILED] = True
    return report


@pytest.fixture(autouse=True)
def settled(request: pytest.FixtureRequest) -> None:
    """Let collections of garbage not look through what earlier tests have left.

    PyTorch keeps some hundred to some thousand objects of every graph that it has traced (caches
    of fake tensors, finalizers of guards). After a thousand tests, each full collection, of which
    a test has several, walked through more than a million. Pytest has freed the objects of the
    test before by now. Those of one that failed are held by its traceback, which is forgotten
    first: frozen, they would stay, and their limits with them.
    """
    if request.config.stash.get(_HAS_FAILED, False):
        request.config.stash[_HAS_FAILED] = False
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):
            vars(sys).pop(name, None)
    free_failed_backward()
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    """Let no collection of garbage look through all that was imported, or is by the first trace."""
    for name in IMPORTED_BY_TRACING:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
