"""What Dynamo has found of a frame is kept, and serves where everything that it rests on holds."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo import convert_frame

import tightfit
from support.precision import default_dtype
from tightfit.dynamo import frame_cache

pytestmark = [
    pytest.mark.filterwarnings("ignore:hooks on module"),
    pytest.mark.skipif(torch.__version__ < (2, 13), reason="nothing is kept of its frames"),
]

SCALE = 2.0


def helper(x):
    return x * SCALE


class OtherClass:
    """Is no module; the forward calls a method of it."""

    def shifted(self, x, by=0.5):
        return x + by


class Net(nn.Module):
    bend = 1.5

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        self.act: Callable[[Any], Any] = F.relu
        self.other_class = OtherClass()
        self.constant = [1.0, 2.0]
        self.table = {"add": 1.0}

    def bent(self, x):
        return x * self.bend

    def forward(self, x):
        x = self.other_class.shifted(self.bent(helper(self.norm(self.one(x)))))
        x = self.inner(self.act(self.other(x))) + self.table["add"]
        return x.square().sum() * sum(self.constant)


@pytest.fixture(scope="module")
def of_another_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what is kept once a `Net` was trained."""
    folder = tmp_path_factory.mktemp("kept")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIGHTFIT_CACHE_DIR", str(folder))
        torch._dynamo.reset()
        assert is_right()
        torch._dynamo.reset()
    assert len(kept_files(folder)) == 1
    return folder


@pytest.fixture
def known(of_another_process: Path, tmp_path: Path, followed: list[str]) -> list[str]:
    """Return what `followed` returns; what is kept of a `Net` is there already."""
    shutil.copytree(of_another_process, tmp_path, dirs_exist_ok=True)
    return followed


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Return a list that grows with every frame that Dynamo follows; nothing is kept as yet."""
    monkeypatch.setenv("TIGHTFIT_CACHE_DIR", str(tmp_path))
    made: list[str] = []
    plain = convert_frame._compile

    def noted(code: Any, *args: Any, **kwargs: Any) -> Any:
        made.append(code.co_qualname)
        return plain(code, *args, **kwargs)

    monkeypatch.setattr(convert_frame, "_compile", noted)
    return made


def made(change: Callable[[Net], Any] | None = None) -> Net:
    torch.manual_seed(0)
    net = Net()
    if change is not None:
        change(net)
    return net


def gradients(net: nn.Module, *inputs: Any) -> list[torch.Tensor]:
    """Return the gradients of a step, and what the forward has returned."""
    torch.manual_seed(1)
    for parameter in net.parameters():
        parameter.grad = None
    output = net(*inputs)
    if output.requires_grad:
        output.backward()
    held = [p.grad for p in net.parameters() if p.grad is not None]
    return [output.detach(), *held, *(buffer.clone() for buffer in net.buffers())]


def fitted(net: nn.Module) -> nn.Module:
    """Return a model that is fitted as in a new process."""
    torch._dynamo.reset()
    return tightfit.fit(net, "1GiB", costs="unit")


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def agree(within: nn.Module, plain: nn.Module) -> bool:
    torch.manual_seed(2)
    x = torch.randn(3, 4, dtype=next(plain.parameters()).dtype)
    return same(gradients(within, x), gradients(plain, x))


def twins(kind: type[nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Return a fitted module and a plain one with the same numbers."""
    plain, within = kind(), fitted(kind())
    within.load_state_dict(plain.state_dict())
    return within, plain


def kept_files(folder: Path) -> list[Path]:
    return sorted((folder / "traces").glob("*.frame.gz"))


def is_right(change: Callable[[Net], Any] | None = None) -> bool:
    """Whether a fitted model trains as a plain one does."""
    return agree(fitted(made(change)), made(change))


def test_kept_frames_are_used_again(followed: list[str], tmp_path: Path) -> None:
    assert is_right()
    assert len(followed) == 1 and len(kept_files(tmp_path)) == 1
    assert is_right() and is_right()
    assert len(followed) == 1


# -- whatever differs, Python is traced again ----------------------------------------------------


def tie(net: Net) -> None:
    net.other.weight = net.one.weight


def share_storage(net: Net) -> None:
    both = torch.randn(8, 4)
    net.one.weight, net.other.weight = nn.Parameter(both[:4]), nn.Parameter(both[4:])


def other_shift(x, by=0.5):
    return x - by


DIFFERENCES: dict[str, Callable[[Net], Any]] = {
    "a function": lambda net: setattr(net, "act", torch.tanh),
    "a function of the user": lambda net: setattr(net, "act", helper),
    "a constant": lambda net: setattr(net, "constant", [1.0, 3.0]),
    "a further constant": lambda net: net.constant.append(1.0),
    "an item": lambda net: net.table.update(add=2.0),
    "an attribute instead of one of the class": lambda net: setattr(net, "bend", 2.5),
    "evaluation": lambda net: net.eval(),
    "evaluation of a part": lambda net: net.norm.eval(),
    "a rate": lambda net: setattr(net.inner[1], "p", 0.25),
    "a frozen weight": lambda net: net.one.weight.requires_grad_(False),
    "a precision": lambda net: net.double(),
    "a missing bias": lambda net: setattr(net.one, "bias", None),
    "a tied weight": tie,
    "weights in one storage": share_storage,
    "a hook": lambda net: net.one.register_forward_hook(lambda m, args, output: 2 * output),
    "a hook before": lambda net: net.one.register_forward_pre_hook(lambda m, args: 2 * args[0]),
    "a further module": lambda net: net.inner.append(nn.Tanh()),
    "another forward of one module": lambda net: setattr(net.one, "forward", torch.sin),
    "another method of one module": lambda net: setattr(net, "bent", torch.sin),
    "another method of one object": lambda net: setattr(net.other_class, "shifted", other_shift),
    "another class": lambda net: setattr(net.norm, "__class__", Softer),
}


class Softer(nn.BatchNorm1d):
    def forward(self, x):
        return 0.5 * super().forward(x)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_model_that_differs_is_followed(name: str, known: list[str]) -> None:
    assert is_right(DIFFERENCES[name])
    assert len(known) == 1
    assert is_right()
    assert len(known) == 1


THIS = sys.modules[__name__]
PLAIN = F.linear
ELSEWHERE: dict[str, tuple[Any, str, Any]] = {
    "a global constant": (THIS, "SCALE", 3.0),
    "a global function": (THIS, "helper", lambda x: x * SCALE + 1),
    "a forward of a class": (nn.Dropout, "forward", lambda self, x: 2 * x),
    "a method of a class": (Net, "bent", lambda self, x: x - self.bend),
    "a constant of a class": (Net, "bend", 0.5),
    "a method of another class": (OtherClass, "shifted", lambda self, x, by=0.5: x - by),
    "a default": (OtherClass.shifted, "__defaults__", (0.25,)),
    "code of a function": (helper, "__code__", (lambda x: x - SCALE).__code__),
    "a function of PyTorch": (F, "linear", lambda x, w, b=None: PLAIN(x, w, b) * 2),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_changes_outside_of_the_model_make_new_frames(
    name: str, known: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    where, attribute, value = ELSEWHERE[name]
    if name == "a method of another class":
        value = lambda self, x, by=0.5: other_shift(x, by)  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(where, attribute, value)
        assert is_right()
    assert len(known) == 1
    assert is_right()
    assert len(known) == 1


def test_other_sizes_make_new_frames(known: list[str]) -> None:
    plain, within = made(), fitted(made())
    for rows in (5, 3):
        x = torch.randn(rows, 4)
        assert same(gradients(within, x), gradients(plain, x))
    assert len(known) == 1


@contextlib.contextmanager
def _determined() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SURROUNDINGS: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "the precision of new tensors": lambda: default_dtype(torch.float64),
    "determinism": _determined,
    "a setting of Dynamo": lambda: torch._dynamo.config.patch(capture_scalar_outputs=True),
}


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_surroundings_of_a_model_count(name: str, known: list[str]) -> None:
    plain, within = made(), fitted(made())
    with SURROUNDINGS[name]():
        assert agree(within, plain)
    assert len(known) == 1


def test_a_setting_that_was_put_back_counts_no_more(known: list[str]) -> None:
    with SURROUNDINGS["a setting of Dynamo"]():
        pass
    assert is_right()
    assert not known


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", [*DIFFERENCES, *ELSEWHERE])
def test_changes_after_a_kept_frame_was_used_are_noticed(
    name: str, known: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards are those of this process: they see what changes from now on."""
    plain, within = made(), fitted(made())
    assert agree(within, plain)
    assert not known
    if name in DIFFERENCES:
        for net in (plain, within):
            torch.manual_seed(3)
            DIFFERENCES[name](net)
    else:
        where, attribute, value = ELSEWHERE[name]
        monkeypatch.setattr(where, attribute, value)
    assert agree(within, plain)


def test_evaluation_without_gradients_is_right(followed: list[str]) -> None:
    for _ in range(2):
        plain, within = made().eval(), fitted(made().eval())
        with torch.no_grad():
            assert agree(within, plain)
        assert agree(within, plain)


# -- values that a class or a function has closed over -------------------------------------------


class Holding:
    def __init__(self, value: float) -> None:
        self.value = value


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)


def closing_over_an_object(value: float) -> type[nn.Module]:
    held = Holding(value)

    class Closing(Linear):
        def forward(self, x):
            return self.layer(x).sum() * held.value

    return Closing


def closing_over_a_function(value: float) -> type[nn.Module]:
    part = functools.partial(lambda factor, x: x * factor, value)

    class Closing(Linear):
        def forward(self, x):
            return part(self.layer(x)).sum()

    return Closing


def asking_a_metaclass(value: float) -> type[nn.Module]:
    class Meta(type):
        factor = value

    class Asked(metaclass=Meta):
        pass

    class Asking(Linear):
        def forward(self, x):
            return self.layer(x).sum() * Asked.factor

    return Asking


def decorated(value: float) -> type[nn.Module]:
    def scaled(function: Any) -> Any:
        @functools.wraps(function)
        def inner(*args: Any) -> Any:
            return function(*args) * value

        return inner

    class Decorated(Linear):
        @scaled
        def forward(self, x):
            return self.layer(x).sum()

    return Decorated


def computing_attributes(value: float) -> type[nn.Module]:
    class Computing(Linear):
        def __getattr__(self, name: str) -> Any:
            return value if name == "factor" else super().__getattr__(name)

        def forward(self, x):
            return self.layer(x).sum() * self.factor

    return Computing


def remembering(value: float) -> type[nn.Module]:
    held = Holding(value)

    @functools.lru_cache
    def factor() -> float:
        return held.value

    class Remembering(Linear):
        def forward(self, x):
            return self.layer(x).sum() * factor()

    return Remembering


def with_a_default(value: float) -> type[nn.Module]:
    class Defaulting(Linear):
        def forward(self, x, held=Holding(value)):  # noqa: B008
            return self.layer(x).sum() * held.value

    return Defaulting


def importing(value: float) -> type[nn.Module]:
    sys.modules["of_a_user"] = types.ModuleType("of_a_user")
    sys.modules["of_a_user"].factor = lambda: value  # type: ignore[attr-defined]

    class Importing(Linear):
        def forward(self, x):
            from of_a_user import factor

            return self.layer(x).sum() * factor()

    return Importing


@pytest.mark.parametrize(
    "kind_of",
    [
        closing_over_an_object,
        closing_over_a_function,
        asking_a_metaclass,
        decorated,
        computing_attributes,
        remembering,
        with_a_default,
        importing,
    ],
)
def test_a_value_that_is_another_one_counts(
    kind_of: Callable[[float], type[nn.Module]], followed: list[str]
) -> None:
    for value in (2.0, 3.0, 2.0):
        assert agree(*twins(kind_of(value)))


# -- what is not kept -----------------------------------------------------------------------------


class Broken(Net):
    def forward(self, x):
        x = self.one(x)
        torch._dynamo.graph_break()
        return self.other(x).sum()


class Asking(Net):
    def forward(self, x):
        return self.one(x).sum() * float(os.environ.get("TIGHTFIT_TEST_FACTOR", "1"))


class Marked(Net):
    def forward(self, x):
        return self.one(x).sum() * constant_result()


@torch._dynamo.assume_constant_result
def constant_result() -> float:
    return SCALE


class Counting(Net):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return self.one(x).sum() * self.calls


@pytest.mark.parametrize("kind", [Broken, Asking, Marked])
def test_what_a_file_cannot_hold_is_followed_each_time(
    kind: type[Net], followed: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        count = len(followed)
        within, plain = twins(kind)
        assert agree(within, plain) and agree(within, plain)
        assert len(followed) > count
    assert "Traceback" not in capfd.readouterr().err


def test_a_counter_continues_with_kept_frames(followed: list[str]) -> None:
    for _ in range(2):
        within, plain = twins(Counting)
        for _ in range(4):
            assert agree(within, plain)


# -- files ----------------------------------------------------------------------------------------


def test_a_damaged_file_is_as_none(known: list[str], tmp_path: Path) -> None:
    (file,) = kept_files(tmp_path)
    for content in (b"", b"nonsense", file.read_bytes()[:-20]):
        file.write_bytes(content)
        count = len(known)
        assert is_right() and is_right()
        assert len(known) == count + 1


def test_nothing_is_kept_without_a_cache(followed: list[str], tmp_path: Path) -> None:
    net = tightfit.fit(Net(), "1MiB", costs="unit", cache=False)
    net(torch.randn(3, 4)).backward()
    assert followed and not kept_files(tmp_path)


def test_another_installation_has_files_of_its_own(
    known: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = frame_cache.installation
    monkeypatch.setattr(
        frame_cache, "installation", lambda given: (*plain(given), "another release")
    )
    assert is_right()
    assert len(known) == 1


def test_installed_files_that_changed_are_seen(
    followed: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = tmp_path / "library.py"
    library.write_text("x = 1")
    plain = frame_cache.files_of
    date = library.stat().st_mtime_ns
    file = [str(library), library.stat().st_size, date]
    monkeypatch.setattr(frame_cache, "files_of", lambda traced: [*plain(traced), file])
    assert is_right() and is_right()
    assert len(followed) == 1
    os.utime(library, ns=(date + 1, date + 1))
    assert is_right()
    assert len(followed) == 2


MODULE = """
    from torch import nn
    FACTOR = 2.0
    def scaled(x):
        return x * FACTOR
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        def forward(self, x):
            return scaled(self.layers(x))
"""
SCRIPT = """
    import copy
    import torch
    from torch._dynamo import convert_frame
    import tightfit, user
    from tightfit.capture import capture

    followed, traced = [], []
    follow, trace = convert_frame._compile, capture._traced
    convert_frame._compile = lambda *args, **kwargs: followed.append(1) or follow(*args, **kwargs)
    capture._traced = lambda *args: traced.append(1) or trace(*args)
    torch.manual_seed(0)
    net = user.Net()
    fitted = tightfit.fit(copy.deepcopy(net), "1MiB", costs="unit")
    x = torch.randn(8, 4)
    for each in (net, fitted):
        torch.manual_seed(1)
        for _ in range(2):
            each(x).square().mean().backward()
    pairs = zip(net.parameters(), fitted.parameters())
    same = all(torch.equal(one.grad, other.grad) for one, other in pairs)
    print(len(followed), len(traced), same)
"""


def _said(folder: Path) -> list[str]:
    around = {
        **os.environ,
        "TIGHTFIT_CACHE_DIR": str(folder / "cache"),
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT)]
    done = subprocess.run(command, env=around, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.split()


def test_another_process_follows_and_traces_nothing_until_the_code_changes(tmp_path: Path) -> None:
    user = tmp_path / "user.py"
    user.write_text(textwrap.dedent(MODULE))
    assert _said(tmp_path) == ["1", "1", "True"]
    assert _said(tmp_path) == ["0", "0", "True"]
    user.write_text(user.read_text().replace("x * FACTOR", "x - FACTOR"))
    assert _said(tmp_path) == ["1", "1", "True"]
