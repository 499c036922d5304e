"""Changes between two steps: weights and buffers, what PyTorch is set to, inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from support.contract.between_steps import body, case
from support.contract.changes import Change, ChangeCase, Changing, one_batch
from support.contract.outputs import Net
from support.precision import default_dtype


class WritesBuffer(Net):
    """Reads one buffer before and after it writes another."""

    def __init__(self) -> None:
        super().__init__(lambda s, x: s.counted(x))
        self.register_buffer("g", torch.ones(8))

    def counted(self, x):
        z = self.a(x) + self.g
        self.h += 1
        return z + self.g


def weights() -> list[ChangeCase]:
    """Parameters and buffers that are replaced, written, frozen, converted."""

    def data(c: Changing) -> None:
        c.module.a.weight.data = torch.randn(8, 8)

    def written(c: Changing) -> None:
        with torch.no_grad():
            c.module.a.weight.copy_(torch.randn(8, 8))

    def parameter(c: Changing) -> None:
        c.module.a.weight = nn.Parameter(torch.randn(8, 8))

    def loaded(c: Changing) -> None:
        c.module.load_state_dict(Net(body).state_dict())

    def assigned(c: Changing) -> None:
        c.module.load_state_dict(Net(body).state_dict(), assign=True)

    def converted(c: Changing) -> None:
        c.module.to(torch.float64)
        c.inputs = lambda: (torch.randn(4, 8, dtype=torch.float64),)

    def back(c: Changing) -> None:
        c.module.to(torch.float32)
        c.inputs = one_batch

    def halved(c: Changing) -> None:
        c.module.bfloat16()
        c.inputs = lambda: (torch.randn(4, 8, dtype=torch.bfloat16),)

    def tied(c: Changing) -> None:
        c.module.b.weight = c.module.a.weight

    def untied(c: Changing) -> None:
        c.module.b.weight = nn.Parameter(c.module.b.weight.detach().clone())

    def no_bias(c: Changing) -> None:
        c.module.a.bias = None

    def frozen(c: Changing) -> None:
        c.module.a.requires_grad_(False)

    def thawed(c: Changing) -> None:
        c.module.a.requires_grad_(True)

    def all_frozen(c: Changing) -> None:
        c.module.requires_grad_(False)

    def all_thawed(c: Changing) -> None:
        c.module.requires_grad_(True)

    def exchanged(c: Changing) -> None:
        torch.utils.swap_tensors(c.module.a.weight, nn.Parameter(torch.randn(8, 8)))

    def transposed(c: Changing) -> None:
        c.module.a.weight.data = torch.randn(8, 8).t()

    def another_shape(c: Changing) -> None:
        c.module.h = torch.rand(4, 8)

    def made_an_alias(c: Changing) -> None:
        c.module.g = c.module.h.detach()

    def made_its_own(c: Changing) -> None:
        c.module.g = torch.ones(8)

    def buffer_trained(c: Changing) -> None:
        del c.module.h
        c.module.h = nn.Parameter(torch.rand(8))

    def parameter_kept(c: Changing) -> None:
        weight = c.module.a.weight.detach().clone()
        del c.module.a.weight
        c.module.a.register_buffer("weight", weight)

    def buffer_with_history(c: Changing) -> None:
        c.module.h = c.module.p.sum(0).sigmoid()

    def first_gradient_kept(c: Changing) -> None:
        c.module.a.weight.grad = torch.ones(8, 8)

    return [
        case("weights: data replaced", data),
        case("weights: written in place", written),
        case("weights: a new parameter", parameter),
        case("weights: load_state_dict", loaded),
        case("weights: load_state_dict with assign", assigned),
        case("weights: to float64 and back", converted, back),
        case("weights: to bfloat16", halved),
        case("weights: tied, then untied", tied, untied),
        case("weights: a bias removed", no_bias),
        case("weights: one layer frozen, then thawed", frozen, thawed),
        case("weights: all frozen, then thawed", all_frozen, all_thawed),
        case("weights: swap_tensors", exchanged),
        case("weights: data with other strides", transposed),
        case("weights: a gradient that is there before", first_gradient_kept),
        case("weights: a parameter becomes a buffer", parameter_kept),
        case("buffer replaced", lambda c: setattr(c.module, "h", torch.rand(8))),
        case("buffer written", lambda c: c.module.h.mul_(3)),
        case("buffer replaced by one of another shape", another_shape),
        case("buffer of another dtype", lambda c: setattr(c.module, "h", torch.rand(8).double())),
        case("buffer becomes a parameter", buffer_trained),
        case("buffer with a history of its own", buffer_with_history),
        case("buffer that needs a gradient", lambda c: c.module.h.requires_grad_()),
        ChangeCase(
            "a buffer tied to one that is written", WritesBuffer, (made_an_alias, made_its_own)
        ),
        case("buffer and weight tied", lambda c: setattr(c.module, "h", c.module.a.bias.detach())),
    ]


class Counting(TorchDispatchMode):
    """Adds one to each product of matrices."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result + 1 if func is torch.ops.aten.addmm.default else result


class Replacing(TorchFunctionMode):
    """Runs another activation."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return args[0] * 2 if func is F.relu else func(*args, **(kwargs or {}))


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Ask for algorithms that are deterministic."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def precision() -> Iterator[None]:
    """Allow less precise products of matrices."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def two_threads() -> Iterator[None]:
    """Let operators use two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def around() -> list[ChangeCase]:
    """What is entered around the forward."""

    def entered(
        name: str, enter: Callable[[], Any], is_seen: bool = True, **more: Any
    ) -> ChangeCase:
        return case(
            f"around: {name}",
            lambda c: c.around.append(enter),
            lambda c: c.around.pop(),
            is_seen=is_seen,
            **more,
        )

    def made(s: Net, x: torch.Tensor) -> torch.Tensor:
        return s.a(x) * torch.linspace(0, 1, 8)

    def attention(s: Net, x: torch.Tensor) -> torch.Tensor:
        q = s.a(x).view(1, 2, 4, 4)
        return F.scaled_dot_product_attention(q, q, q)

    def asks(s: Net, x: torch.Tensor) -> torch.Tensor:
        scale = 3.0 if torch.are_deterministic_algorithms_enabled() else 1.0
        return s.a(x) * scale

    def asks_autocast(s: Net, x: torch.Tensor) -> torch.Tensor:
        return s.a(x) * (3.0 if torch.is_autocast_enabled("cpu") else 1.0)

    def vmapped(call: Callable[..., Any], x: torch.Tensor) -> Any:
        return torch.func.vmap(call)(x)

    def functional(call: Callable[..., Any], x: torch.Tensor) -> Any:
        return torch.func.functional_call(call, {"a.weight": torch.ones(8, 8)}, (x,))

    def checkpointed(call: Callable[..., Any], x: torch.Tensor) -> Any:
        return checkpoint(call, x, use_reentrant=False)

    def jacobian(call: Callable[..., Any], x: torch.Tensor) -> Any:
        return torch.func.jacrev(call)(x)

    def differentiated(call: Callable[..., Any], x: torch.Tensor) -> Any:
        x.requires_grad_()
        (gradient,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
        return gradient

    def run(name: str, how: Callable[..., Any], is_seen: bool = True) -> ChangeCase:
        changes: tuple[Change, ...] = (
            lambda c: setattr(c, "runs", how),
            lambda c: setattr(c, "runs", None),
        )
        return case(f"around: {name}", *changes, is_seen=is_seen)

    bfloat16, half = torch.bfloat16, torch.float16
    backends = torch.backends
    return [
        entered("autocast", lambda: torch.autocast("cpu", bfloat16)),
        entered("autocast to float16", lambda: torch.autocast("cpu", half)),
        entered(
            "autocast that is off", lambda: torch.autocast("cpu", enabled=False), is_seen=False
        ),
        entered(
            "autocast, asked for", lambda: torch.autocast("cpu", bfloat16), function=asks_autocast
        ),
        entered("no_grad", torch.no_grad),
        entered("inference_mode", torch.inference_mode),
        entered("another default dtype", lambda: default_dtype(torch.float64), function=made),
        entered("deterministic algorithms", deterministic, is_seen=False),
        entered("deterministic algorithms, asked for", deterministic, function=asks),
        entered("the precision of products", precision, is_seen=False),
        entered("two threads", two_threads, is_seen=False),
        entered("oneDNN switched off", lambda: backends.mkldnn.flags(enabled=False), is_seen=False),
        entered(
            "attention by its formula",
            lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
            function=attention,
        ),
        entered(
            "anomaly detection",
            lambda: torch.autograd.detect_anomaly(check_nan=False),
            is_seen=False,
        ),
        entered(
            "hooks of saved tensors",
            lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t),
        ),
        entered("a dispatch mode", Counting),
        entered("a function mode", Replacing),
        entered("a default device", lambda: torch.device("cpu"), is_seen=False),
        run("vmap", vmapped, is_seen=False),
        run("functional_call with other weights", functional),
        run("checkpoint", checkpointed, is_seen=False),
        run("jacrev", jacobian),
        run("a gradient by the input", differentiated),
    ]


def inputs() -> list[ChangeCase]:
    """Inputs of other kinds."""

    def given(
        name: str,
        make: Callable[[], Any],
        first: Callable[[], Any] = one_batch,
        function: Callable[..., Any] = body,
        *,
        is_seen: bool = True,
    ) -> ChangeCase:
        def change(c: Changing) -> None:
            c.inputs = make

        def back(c: Changing) -> None:
            c.inputs = first

        return ChangeCase(
            f"inputs: {name}", lambda: Net(function), (change, back), first, is_seen=is_seen
        )

    def optional(s: Net, x: torch.Tensor, y: Any = None, *, flag: bool = False) -> Any:
        x = s.a(x)
        x = x if y is None else x * y
        return x.tanh() if flag else x

    def summed(s: Net, xs: Any) -> Any:
        return sum(s.a(x) for x in (xs.values() if isinstance(xs, dict) else xs))

    def changed(s: Net, x: torch.Tensor, y: torch.Tensor) -> Any:
        x.mul_(2)
        return s.a(x) * s.b(y)

    def strided(s: Net, x: torch.Tensor) -> Any:
        return s.a(x) * x.stride(0), x.is_contiguous()

    def draw(*shape: int, **options: Any) -> Callable[[], Any]:
        return lambda: (torch.randn(*shape, **options),)

    def doubled() -> Any:
        x = torch.randn(4, 8)
        return x, x

    def two() -> Any:
        return torch.randn(4, 8), torch.randn(4, 8)

    def overlapping() -> Any:
        x = torch.randn(5, 8)
        return x[1:], x[:4]

    def with_number(value: Any) -> Callable[[], Any]:
        return lambda: (torch.randn(4, 8), value)

    def by_keyword(**options: Any) -> Callable[[], Any]:
        return lambda: (torch.randn(4, 8), options)

    def many(count: int) -> Callable[[], Any]:
        return lambda: ([torch.randn(4, 8) for _ in range(count)],)

    def keyed(*keys: str) -> Callable[[], Any]:
        return lambda: ({key: torch.randn(4, 8) for key in keys}, {})

    return [
        given("another batch size", draw(6, 8)),
        given("one row", draw(1, 8)),
        given("no rows", draw(0, 8)),
        given("another dimension", draw(2, 4, 8)),
        given("transposed", lambda: (torch.randn(8, 4).t(),), function=strided),
        given("every other row", lambda: (torch.randn(8, 8)[::2],), function=strided),
        given("an offset in its storage", lambda: (torch.randn(5, 8)[1:],)),
        given("expanded", lambda: (torch.randn(1, 8).expand(4, 8),), function=strided),
        given("it needs a gradient", draw(4, 8, requires_grad=True)),
        given("it was computed", lambda: (torch.randn(4, 8, requires_grad=True) * 1,)),
        given("a parameter", lambda: (nn.Parameter(torch.randn(4, 8)),)),
        given("another dtype", lambda: (torch.randn(4, 8).double(),)),
        given("a second tensor", two, function=optional),
        given("None in the place of a tensor", with_number(None), two, optional),
        given("a number", with_number(2.0), with_number(1.0), optional),
        given("a whole number", with_number(3), with_number(2), optional),
        given("a number in the place of a tensor", with_number(2.0), two, optional),
        given("a keyword", by_keyword(flag=True), function=optional),
        given(
            "a tensor by keyword",
            lambda: (torch.randn(4, 8), {"y": torch.randn(4, 8)}),
            two,
            optional,
        ),
        given("a longer list", many(3), many(2), summed),
        given("another key", keyed("a", "c"), keyed("a", "b"), summed),
        given("keys in another order", keyed("b", "a"), keyed("a", "b"), summed),
        given("a tuple for a list", lambda: (tuple(many(2)()[0]),), many(2), summed),
        given("one tensor twice, changed inside", doubled, two, changed),
        given("overlapping tensors, changed inside", overlapping, two, changed),
        given("overlapping tensors", overlapping, two, lambda s, x, y: s.a(x) * y),
    ]


SURROUNDINGS: tuple[ChangeCase, ...] = (*weights(), *around(), *inputs())
