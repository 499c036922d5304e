"""Changes between two steps: hooks, forwards, what Python holds, containers of modules."""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as modules
from torch.nn.utils import parametrizations, parametrize, prune

from support.contract.changes import Change, ChangeCase, Changing
from support.contract.outputs import Net


def body(s: Net, x: torch.Tensor) -> torch.Tensor:
    """Compute what most cases compute."""
    return s.b(F.relu(s.a(x))) * s.h


def case(
    name: str,
    *changes: Change,
    function: Callable[..., Any] = body,
    is_seen: bool = True,
    **attributes: Callable[[], Any],
) -> ChangeCase:
    """Return a case of a function of `Net` with some attributes."""

    def model() -> nn.Module:
        made = Net(function)
        made.log = []
        for key, make in attributes.items():
            setattr(made, key, make())
        return made

    return ChangeCase(name, model, changes, is_seen=is_seen)


def hooked(
    name: str, add: Callable[[Changing], Any], function: Callable[..., Any] = body
) -> ChangeCase:
    """Return a case in which a hook is added, then removed."""
    return case(name, lambda c: c.handles.append(add(c)), Changing.remove_hooks, function=function)


def hooks() -> list[ChangeCase]:
    """Hooks of every kind, of the outermost module, of an inner one, and of all."""

    def doubled(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output * 2

    def doubled_only_a(module: nn.Module, inputs: Any, output: torch.Tensor) -> Any:
        return output * 2 if isinstance(module, nn.Linear) else None

    def halved(module: nn.Module, inputs: Any) -> Any:
        return (inputs[0] * 0.5, *inputs[1:])

    def halved_only_linear(module: nn.Module, inputs: Any) -> Any:
        return (inputs[0] * 0.5,) if isinstance(module, nn.Linear) else None

    def with_keywords(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return (args[0] * 0.5,), kwargs

    def output_with_keywords(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        return output * 2

    def backward(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        return tuple(g if g is None else g * 2 for g in inputs)

    def backward_pre(module: nn.Module, outputs: Any) -> Any:
        return tuple(g if g is None else g * 2 for g in outputs)

    def all_backward(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        is_one = isinstance(module, nn.Linear) and module.in_features == 8
        return backward(module, inputs, outputs) if is_one else None

    def looking(c: Changing) -> Callable[..., None]:
        log = c.module.log
        return lambda m, i, o: log.append(tuple(o.shape))

    def reading(c: Changing) -> Callable[..., None]:
        log = c.module.log
        return lambda m, i, o: log.append(o.detach().clone())

    def looking_back(c: Changing) -> Callable[..., None]:
        log = c.module.log
        return lambda m, i, o: log.append(tuple(o[0].shape))

    places: dict[str, Callable[[nn.Module], nn.Module]] = {
        "outermost": lambda m: m,
        "inner": lambda m: m.a,
    }
    found = []
    for where, of in places.items():
        found += [
            hooked(
                f"forward hook ({where})",
                lambda c, of=of: of(c.module).register_forward_hook(doubled),
            ),
            hooked(
                f"forward hook that looks ({where})",
                lambda c, of=of: of(c.module).register_forward_hook(looking(c)),
            ),
            hooked(
                f"forward hook that reads values ({where})",
                lambda c, of=of: of(c.module).register_forward_hook(reading(c)),
            ),
            hooked(
                f"forward hook with keywords ({where})",
                lambda c, of=of: of(c.module).register_forward_hook(
                    output_with_keywords, with_kwargs=True
                ),
            ),
            hooked(
                f"forward hook that is always called ({where})",
                lambda c, of=of: of(c.module).register_forward_hook(doubled, always_call=True),
            ),
            hooked(
                f"forward pre-hook ({where})",
                lambda c, of=of: of(c.module).register_forward_pre_hook(halved),
            ),
            hooked(
                f"forward pre-hook with keywords ({where})",
                lambda c, of=of: of(c.module).register_forward_pre_hook(
                    with_keywords, with_kwargs=True
                ),
            ),
            hooked(
                f"full backward pre-hook ({where})",
                lambda c, of=of: of(c.module).register_full_backward_pre_hook(backward_pre),
            ),
            hooked(
                f"full backward hook that looks ({where})",
                lambda c, of=of: of(c.module).register_full_backward_hook(looking_back(c)),
            ),
        ]
    kinds: dict[str, Callable[[Changing], Any]] = {
        "forward hook": lambda c: modules.register_module_forward_hook(doubled_only_a),
        "forward pre-hook": lambda c: modules.register_module_forward_pre_hook(halved_only_linear),
        "full backward hook": lambda c: modules.register_module_full_backward_hook(all_backward),
        "full backward pre-hook": lambda c: modules.register_module_full_backward_pre_hook(
            backward_pre
        ),
        "forward hook that looks": lambda c: modules.register_module_forward_hook(looking(c)),
    }

    def added_globally(add: Callable[[Changing], Any]) -> Callable[[Changing], Any]:
        def do(c: Changing) -> Any:
            handle = add(c)
            c.undo.callback(handle.remove)
            return handle

        return do

    def tensor_hook(s: Net, x: torch.Tensor) -> torch.Tensor:
        z = s.a(x)
        z.register_hook(lambda g: g * s.factor)
        return s.b(z)

    def set_again(c: Changing) -> None:
        c.module.factor = 3.0

    def replaced(c: Changing) -> None:
        ((key, _),) = c.module.a._forward_hooks.items()
        c.module.a._forward_hooks[key] = doubled

    def with_hook() -> nn.Module:
        made = Net(body)
        made.a.register_forward_hook(lambda m, i, o: o * 3)
        return made

    return [
        *found,
        hooked(
            "full backward hook (inner)", lambda c: c.module.b.register_full_backward_hook(backward)
        ),
        *(hooked(f"global {name}", added_globally(add)) for name, add in kinds.items()),
        hooked(
            "hook of a parameter's gradient",
            lambda c: c.module.a.weight.register_hook(lambda g: g * 2),
        ),
        hooked(
            "hook after a parameter's gradient",
            lambda c: c.module.a.weight.register_post_accumulate_grad_hook(
                lambda p: p.grad.mul_(2)
            ),
        ),
        case(
            "hook of a hidden tensor, its factor changed",
            set_again,
            function=tensor_hook,
            factor=lambda: 1.0,
        ),
        ChangeCase("a forward hook replaced in the dictionary", with_hook, (replaced,)),
        case(
            "a hook of state_dict",
            lambda c: c.module.register_state_dict_post_hook(lambda *a: None),
            is_seen=False,
        ),
        case(
            "second forward hook",
            lambda c: c.module.a.register_forward_hook(doubled),
            lambda c: c.module.a.register_forward_hook(doubled),
        ),
    ]


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, x):
        return x * 2


def parametrizations_() -> list[ChangeCase]:
    """Parametrizations, pruning, and caching of parametrizations."""

    def add(c: Changing) -> None:
        parametrize.register_parametrization(c.module.a, "weight", Doubled())

    def remove(c: Changing) -> None:
        parametrize.remove_parametrizations(c.module.a, "weight")

    def masked(c: Changing) -> None:
        prune.l1_unstructured(c.module.a, "weight", 0.5)

    def unmasked(c: Changing) -> None:
        prune.remove(c.module.a, "weight")

    def parametrized() -> nn.Module:
        made = Net(lambda s, x: s.a(s.a(x)))
        parametrize.register_parametrization(made.a, "weight", Doubled())
        return made

    return [
        case("a parametrization added and removed", add, remove),
        case("spectral norm added", lambda c: parametrizations.spectral_norm(c.module.a)),
        case("weight norm added", lambda c: parametrizations.weight_norm(c.module.a)),
        case("pruning added and made permanent", masked, unmasked),
        ChangeCase(
            "parametrizations cached",
            parametrized,
            (lambda c: c.around.append(parametrize.cached),),
            is_seen=False,
        ),
    ]


class Normed(nn.Module):
    """A layer with statistics and dropout, and another one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3))
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        return self.head(self.body(x))


def modes() -> list[ChangeCase]:
    """Training and evaluation, of all and of some, and what layers hold as numbers."""

    def of(name: str, *changes: Change) -> ChangeCase:
        return ChangeCase(name, Normed, changes)

    return [
        of("eval, then train", lambda c: c.module.eval(), lambda c: c.module.train()),
        of("eval of dropout", lambda c: c.module.body[3].eval()),
        of("eval of BatchNorm", lambda c: c.module.body[1].eval(), lambda c: c.module.train()),
        of("training set as an attribute", lambda c: setattr(c.module.body[3], "training", False)),
        of("p of dropout", lambda c: setattr(c.module.body[3], "p", 0.9)),
        of("momentum of BatchNorm", lambda c: setattr(c.module.body[1], "momentum", 0.9)),
        of("momentum of BatchNorm to None", lambda c: setattr(c.module.body[1], "momentum", None)),
        of("eps of BatchNorm", lambda c: setattr(c.module.body[1], "eps", 0.5)),
        of("statistics of BatchNorm reset", lambda c: c.module.body[1].reset_running_stats()),
        of("statistics of BatchNorm not kept", statistics_not_kept),
        of("inplace of ReLU", lambda c: setattr(c.module.body[2], "inplace", True)),
        of("a layer of a Sequential replaced", lambda c: c.module.body.__setitem__(2, nn.Tanh())),
        of("a layer appended to a Sequential", lambda c: c.module.body.append(nn.Tanh())),
        of("a layer of a Sequential removed", lambda c: c.module.body.pop(2)),
        of("a layer replaced by Identity", lambda c: setattr(c.module, "head", nn.Identity())),
        of("a seed", lambda c: c.around.append(seeded)),
    ]


class seeded:  # noqa: N801
    """Sets another seed."""

    def __enter__(self):
        torch.manual_seed(77)

    def __exit__(self, *_):
        pass


def statistics_not_kept(c: Changing) -> None:
    """Let BatchNorm keep no statistics."""
    norm = c.module.body[1]
    norm.track_running_stats = False
    norm.running_mean = norm.running_var = None


SCALE = 1.0
TABLE = torch.ones(8)
SCALES = [1.0]
SETTINGS = {"scale": 1.0}
THIS = SimpleNamespace(config=SimpleNamespace(scale=1.0))


def activation(x: torch.Tensor) -> torch.Tensor:
    """Be replaced."""
    return x.tanh()


class Scaled(nn.Module):
    """Reads an attribute of its class, and calls methods."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), Inner()

    def scaled(self, x):
        return x * self.factor

    def forward(self, x, bias=0.0, *, gain=1.0):
        return self.scaled(self.b(self.a(x))) * gain + bias


class Inner(nn.Module):
    """An inner module of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    @property
    def doubled(self):
        return 2.0

    def forward(self, x):
        return self.linear(x).tanh() * self.doubled


def forwards() -> list[ChangeCase]:
    """Forwards, methods, classes and functions that are replaced."""

    def of(name: str, *changes: Change) -> ChangeCase:
        return ChangeCase(name, Scaled, changes)

    def instance(c: Changing) -> None:
        model = c.module
        model.forward = lambda x: model.a(x) * 2

    def wrapped(c: Changing) -> None:
        before = c.module.forward
        c.module.forward = lambda x: before(x) * 2

    def inner(c: Changing) -> None:
        before = c.module.b.forward
        c.module.b.forward = lambda x: before(x) * 2

    def inner_back(c: Changing) -> None:
        del c.module.b.forward

    def layer(c: Changing) -> None:
        linear = c.module.a
        linear.forward = lambda x: F.linear(x, linear.weight)

    def class_forward(c: Changing) -> None:
        c.set(Scaled, "forward", lambda s, x: s.a(x))

    def inner_class(c: Changing) -> None:
        c.set(Inner, "forward", lambda s, x: s.linear(x))

    def linear_class(c: Changing) -> None:
        c.set(nn.Linear, "forward", lambda s, x: F.linear(x, s.weight) * 2)

    def method(c: Changing) -> None:
        c.module.scaled = lambda x: x * 3

    def class_method(c: Changing) -> None:
        c.set(Scaled, "scaled", lambda s, x: x * 3)

    def class_property(c: Changing) -> None:
        c.set(Inner, "doubled", property(lambda s: 5.0))

    def other_class(c: Changing) -> None:
        class Other(Inner):
            def forward(self, x):
                return self.linear(x)

        c.module.b.__class__ = Other

    def defaults(c: Changing) -> None:
        c.set(Scaled.forward, "__defaults__", (1.0,))

    def keyword_defaults(c: Changing) -> None:
        c.set(Scaled.forward, "__kwdefaults__", {"gain": 2.0})

    def code(c: Changing) -> None:
        c.set(Inner.forward, "__code__", (lambda self, x: self.linear(x)).__code__)

    def call_method(c: Changing) -> None:
        c.set(Inner, "__call__", lambda s, x: s.linear(x))

    return [
        of("forward of the instance", instance),
        of("forward of the instance, wrapped", wrapped),
        of("forward of an inner instance, and back", inner, inner_back),
        of("forward of an inner layer", layer),
        of("forward of the class", class_forward),
        of("forward of an inner class", inner_class),
        of("forward of nn.Linear", linear_class),
        of("a method of the instance", method),
        of("a method of the class", class_method),
        of("a property of an inner class", class_property),
        of("the class of an inner module", other_class),
        of("an attribute of the class", lambda c: c.set(Scaled, "factor", 3.0)),
        of(
            "an attribute of the instance over that of the class",
            lambda c: setattr(c.module, "factor", 3.0),
        ),
        of("default arguments", defaults),
        of("default keyword arguments", keyword_defaults),
        of("the code of a forward", code),
        of("__call__ of an inner class", call_method),
    ]


def set_global(name: str, value: Any) -> Change:
    """Return what sets a global of this file."""
    return lambda c: c.entry(globals(), name, value)


def python() -> list[ChangeCase]:
    """Globals, closures, attributes, and functions of PyTorch that are replaced."""
    cell = {"scale": 1.0}

    def closed(value: float) -> Callable[..., Any]:
        def function(s: Net, x: torch.Tensor) -> torch.Tensor:
            return s.a(x) * value

        return function

    def set_cell(c: Changing) -> None:
        closure = c.module.function.__closure__
        assert closure is not None
        before = closure[0].cell_contents
        closure[0].cell_contents = 3.0
        c.undo.callback(setattr, closure[0], "cell_contents", before)

    def grows(s: Net, x: torch.Tensor) -> torch.Tensor:
        s.seen.append(1)
        return s.a(x) * len(s.seen)

    def counts(s: Net, x: torch.Tensor) -> torch.Tensor:
        s.n += 1
        return s.a(x) * s.n

    def logs(s: Net, x: torch.Tensor) -> torch.Tensor:
        s.n += len(x)
        s.seen.append(float(x.mean()))
        return s.a(x)

    def grad_mode(s: Net, x: torch.Tensor) -> torch.Tensor:
        return s.a(x) * (2 if torch.is_grad_enabled() else 3)

    def environment(s: Net, x: torch.Tensor) -> torch.Tensor:
        return s.a(x) * float(os.environ.get("TIGHTFIT_TESTS_SCALE", "1"))

    def set_environment(c: Changing) -> None:
        os.environ["TIGHTFIT_TESTS_SCALE"] = "3"
        c.undo.callback(os.environ.pop, "TIGHTFIT_TESTS_SCALE")

    def partially(s: Net, x: torch.Tensor) -> torch.Tensor:
        return s.part(s.a(x))

    def doubling(x: torch.Tensor, **options: Any) -> torch.Tensor:
        return x * 2

    def zipped(s: Net, x: torch.Tensor) -> torch.Tensor:
        for name, value in s.table.items():
            x = s.a(x) * value if name != "skip" else x
        return x

    def attribute(name: str, first: Any, second: Any, function: Callable[..., Any]) -> ChangeCase:
        return case(
            name, lambda c: setattr(c.module, "v", second), function=function, v=lambda: first
        )

    def held(
        name: str, make: Callable[[], Any], change: Callable[[Any], Any], f: Callable[..., Any]
    ) -> ChangeCase:
        return case(name, lambda c: change(c.module.v), function=f, v=make)

    @dataclasses.dataclass
    class Config:
        scale: float = 1.0
        sizes: list[int] = dataclasses.field(default_factory=lambda: [1, 2])

    def first_weight(s: Net, x: torch.Tensor) -> torch.Tensor:
        return s.a(x) * s.v

    return [
        case("a global number", set_global("SCALE", 3.0), function=lambda s, x: s.a(x) * SCALE),
        case(
            "a global tensor replaced",
            set_global("TABLE", torch.full((8,), 3.0)),
            function=lambda s, x: s.a(x) * TABLE,
        ),
        case(
            "a global tensor written",
            lambda c: (TABLE.mul_(3), c.undo.callback(TABLE.fill_, 1.0)),
            function=lambda s, x: s.a(x) * TABLE,
        ),
        case(
            "a global list's item",
            lambda c: c.entry(SCALES, 0, 3.0),
            function=lambda s, x: s.a(x) * SCALES[0],
        ),
        case(
            "a global dictionary's item",
            lambda c: c.entry(SETTINGS, "scale", 3.0),
            function=lambda s, x: s.a(x) * SETTINGS["scale"],
        ),
        case(
            "a global object's attribute",
            lambda c: c.set(THIS.config, "scale", 3.0),
            function=lambda s, x: s.a(x) * THIS.config.scale,
        ),
        case(
            "a global function",
            set_global("activation", torch.sigmoid),
            function=lambda s, x: activation(s.a(x)),
        ),
        case("a number in a closure", set_cell, function=closed(1.0)),
        case(
            "a dictionary in a closure",
            lambda c: c.entry(cell, "scale", 3.0),
            function=lambda s, x: s.a(x) * cell["scale"],
        ),
        case(
            "the function that forward calls",
            lambda c: setattr(c.module, "function", lambda s, x: s.a(x)),
        ),
        case("an environment variable", set_environment, function=environment),
        case("F.relu replaced", lambda c: c.set(F, "relu", doubling)),
        case(
            "torch.tanh replaced",
            lambda c: c.set(torch, "tanh", doubling),
            function=lambda s, x: torch.tanh(s.a(x)),
        ),
        case("F.linear replaced", lambda c: c.set(F, "linear", lambda x, w, b=None: x @ w)),
        case(
            "Tensor.tanh replaced",
            lambda c: c.set(torch.Tensor, "tanh", doubling),
            function=lambda s, x: s.a(x).tanh(),
        ),
        case(
            "a partial replaced",
            lambda c: setattr(
                c.module, "part", functools.partial(F.leaky_relu, negative_slope=0.9)
            ),
            function=partially,
            part=lambda: functools.partial(F.leaky_relu, negative_slope=0.1),
        ),
        attribute("a number", 1.0, 3.0, first_weight),
        attribute("an integer", 1, 3, first_weight),
        attribute("a bool", True, False, lambda s, x: s.a(x) if s.v else s.b(x)),
        attribute("a text", "a", "b", lambda s, x: getattr(s, s.v)(x)),
        attribute(
            "None to a number", None, 2.0, lambda s, x: s.a(x) if s.v is None else s.a(x) * s.v
        ),
        attribute("a tuple", (1.0, 2.0), (1.0, 3.0), lambda s, x: s.a(x) * s.v[1]),
        attribute("a tensor", torch.ones(8), torch.full((8,), 3.0), first_weight),
        attribute("a function", torch.tanh, torch.sigmoid, lambda s, x: s.v(s.a(x))),
        attribute("a dtype", torch.float32, torch.float64, lambda s, x: s.a(x).to(s.v)),
        attribute(
            "a list replaced by a longer one", [1.0], [1.0, 2.0], lambda s, x: s.a(x) * sum(s.v)
        ),
        attribute("a whole number to a float of its size", 2, 2.0, lambda s, x: (s.a(x), s.v)),
        attribute("a nan to another nan's sign", 1.0, float("nan"), first_weight),
        attribute(
            "zero to minus zero",
            0.0,
            -0.0,
            lambda s, x: s.a(x).sum() * 0 + torch.tensor(1.0) / (x * 0 + s.v),
        ),
        held(
            "a list's item",
            lambda: [1.0, 2.0],
            lambda v: v.__setitem__(0, 3.0),
            lambda s, x: s.a(x) * s.v[0],
        ),
        held(
            "a list extended",
            lambda: [1.0, 2.0],
            lambda v: v.append(3.0),
            lambda s, x: s.a(x) * sum(s.v),
        ),
        held(
            "a list of tensors extended",
            lambda: [torch.ones(8)],
            lambda v: v.append(torch.ones(8)),
            lambda s, x: s.a(x) * sum(s.v),
        ),
        held(
            "a list of functions extended",
            lambda: [torch.tanh],
            lambda v: v.append(torch.sigmoid),
            lambda s, x: functools.reduce(lambda y, f: f(y), s.v, s.a(x)),
        ),
        held(
            "a dictionary's item",
            lambda: {"k": 1.0},
            lambda v: v.update(k=3.0),
            lambda s, x: s.a(x) * s.v["k"],
        ),
        held(
            "a dictionary extended",
            lambda: {"k": 1.0},
            lambda v: v.update(l=3.0),
            lambda s, x: s.a(x) * sum(s.v.values()),
        ),
        held(
            "a dictionary's order",
            lambda: {"k": 1.0, "l": 3.0},
            lambda v: v.update(k=v.pop("k")),
            lambda s, x: functools.reduce(lambda y, k: s.a(y) * k, s.v.values(), x),
        ),
        held(
            "a set extended",
            lambda: {"relu"},
            lambda v: v.add("tanh"),
            lambda s, x: s.a(x).tanh() if "tanh" in s.v else s.a(x),
        ),
        held(
            "a deque extended",
            lambda: collections.deque([1.0]),
            lambda v: v.append(3.0),
            lambda s, x: s.a(x) * sum(s.v),
        ),
        held(
            "a nested list's item",
            lambda: [[1.0], [2.0]],
            lambda v: v[1].__setitem__(0, 5.0),
            lambda s, x: s.a(x) * s.v[1][0],
        ),
        held(
            "an object's attribute",
            Config,
            lambda v: setattr(v, "scale", 3.0),
            lambda s, x: s.a(x) * s.v.scale,
        ),
        held(
            "an object's list",
            Config,
            lambda v: v.sizes.append(3),
            lambda s, x: s.a(x) * sum(s.v.sizes),
        ),
        held(
            "an object's new attribute",
            Config,
            lambda v: setattr(v, "more", 3.0),
            lambda s, x: s.a(x) * getattr(v, "more", 1.0) if (v := s.v) else x,
        ),
        held("a tensor written", lambda: torch.ones(8), lambda v: v.mul_(3), first_weight),
        held(
            "an array written",
            lambda: numpy.ones(8, numpy.float32),
            lambda v: v.__imul__(3),
            lambda s, x: s.a(x) * torch.from_numpy(s.v),
        ),
        held(
            "an array's number",
            lambda: numpy.ones(2),
            lambda v: v.__imul__(3),
            lambda s, x: s.a(x) * float(s.v[0]),
        ),
        case(
            "an attribute added",
            lambda c: setattr(c.module, "more", 3.0),
            function=lambda s, x: s.a(x) * getattr(s, "more", 1.0),
        ),
        case(
            "an attribute deleted",
            lambda c: delattr(c.module, "v"),
            function=lambda s, x: s.a(x) * getattr(s, "v", 3.0),
            v=lambda: 1.0,
        ),
        case(
            "an inner attribute",
            lambda c: setattr(c.module.b, "v", 3.0),
            function=lambda s, x: s.b(s.a(x)) * getattr(s.b, "v", 1.0),
        ),
        case(
            "a list that grows with each call, reset",
            lambda c: c.module.seen.clear(),
            function=grows,
            seen=list,
        ),
        case(
            "a counter that scales, reset",
            lambda c: setattr(c.module, "n", 0),
            function=counts,
            n=lambda: 0,
        ),
        case(
            "counts and logs, reset",
            lambda c: setattr(c.module, "n", 5),
            function=logs,
            n=lambda: 0,
            seen=list,
        ),
        case(
            "a switch on grad mode",
            lambda c: c.around.append(torch.no_grad),
            lambda c: c.around.pop(),
            function=grad_mode,
        ),
        case(
            "a table of numbers reordered",
            lambda c: setattr(c.module, "table", {"skip": 1.0, "k": 2.0, "l": 1.0}),
            function=zipped,
            table=lambda: {"k": 2.0},
        ),
    ]


def containers() -> list[ChangeCase]:
    """Containers of modules and of parameters."""

    def run(s: Net, x: torch.Tensor) -> torch.Tensor:
        for layer in s.layers:
            x = layer(x).tanh()
        return x

    def chosen(s: Net, x: torch.Tensor) -> torch.Tensor:
        return s.heads[s.chosen](s.a(x))

    def weighted(s: Net, x: torch.Tensor) -> torch.Tensor:
        return s.a(x) * sum(s.scales)

    def listed() -> nn.ModuleList:
        return nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def of(name: str, *changes: Change) -> ChangeCase:
        return case(name, *changes, function=run, layers=listed)

    def named() -> nn.ModuleDict:
        return nn.ModuleDict({"one": nn.Linear(8, 8), "two": nn.Linear(8, 8)})

    def numbers() -> nn.ParameterList:
        return nn.ParameterList([nn.Parameter(torch.ones(8))])

    def tensors() -> list[Any]:
        return [nn.Linear(8, 8)]

    return [
        of("a ModuleList appended", lambda c: c.module.layers.append(nn.Linear(8, 8))),
        of("a ModuleList's item", lambda c: c.module.layers.__setitem__(0, nn.Linear(8, 8))),
        of("a ModuleList shortened", lambda c: c.module.layers.pop(1)),
        of("a ModuleList's order", lambda c: c.module.layers.insert(0, c.module.layers.pop(1))),
        of("a ModuleList replaced", lambda c: setattr(c.module, "layers", listed())),
        of(
            "a layer of another kind",
            lambda c: c.module.layers.__setitem__(1, nn.Sequential(nn.Linear(8, 8), nn.ReLU())),
        ),
        of("a layer twice", lambda c: c.module.layers.__setitem__(1, c.module.layers[0])),
        case(
            "a head of a ModuleDict chosen by name",
            lambda c: setattr(c.module, "chosen", "two"),
            function=chosen,
            heads=named,
            chosen=lambda: "one",
        ),
        case(
            "an entry of a ModuleDict",
            lambda c: c.module.heads.update({"one": nn.Linear(8, 8)}),
            function=chosen,
            heads=named,
            chosen=lambda: "one",
        ),
        case(
            "a ParameterList appended",
            lambda c: c.module.scales.append(nn.Parameter(torch.ones(8))),
            function=weighted,
            scales=numbers,
        ),
        case("an inner module replaced", lambda c: setattr(c.module, "a", nn.Linear(8, 8))),
        case("an inner module of another shape", another_width),
        case("two inner modules swapped", swapped),
        case("an inner module added and used", added, function=body_and_more),
        case("an inner module deleted", deleted, function=body_and_more, more=nn.Tanh),
    ]


def another_width(c: Changing) -> None:
    """Give both layers another width."""
    c.module.a, c.module.b = nn.Linear(8, 16), nn.Linear(16, 8)


def swapped(c: Changing) -> None:
    """Let two layers change places."""
    c.module.a, c.module.b = c.module.b, c.module.a


def added(c: Changing) -> None:
    """Add a layer that forward looks for."""
    c.module.more = nn.Linear(8, 8)


def deleted(c: Changing) -> None:
    """Delete a layer that forward looks for."""
    del c.module.more


def body_and_more(s: Net, x: torch.Tensor) -> torch.Tensor:
    """Run a further layer if there is one."""
    x = s.b(s.a(x))
    return s.more(x) if hasattr(s, "more") else x


BETWEEN_STEPS: tuple[ChangeCase, ...] = (
    *hooks(),
    *parametrizations_(),
    *modes(),
    *forwards(),
    *python(),
    *containers(),
)
