"""Run a forward once for what it is told about the values it computes; keep and change nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tightfit.capture.calls.signature import flatten
from tightfit.capture.calls.structure import unflatten
from tightfit.capture.decisions.answers import Answer, answer_of, is_asking
from tightfit.capture.opaque.mark import opaque_modules
from tightfit.capture.operators.masks import MasksAskedFor
from tightfit.capture.operators.numbers import NumbersAskedFor
from tightfit.capture.reads.python_state import PythonState
from tightfit.capture.side_effects.forwards import SwappedForwards
from tightfit.capture.side_effects.members import alike
from tightfit.capture.traced_call import TracedCall
from tightfit.costs.measured.call import fixed_generators
from tightfit.errors import CaptureError
from tightfit.torch_private import core as private

__all__ = ["Findings", "draws_outside_torch", "probe", "warm_up"]


@dataclass(frozen=True)
class Findings:
    """What a real run of a forward showed.

    Parameters
    ----------
    answers : tuple of Answer
        What it was told, in order, opaque modules left out.
    examples : mapping of str to tuple of tuple
        By opaque module: the flattened arguments of each call, those that are no index, mask or
        count left out (None).
    """

    answers: tuple[Answer, ...]
    examples: Mapping[str, tuple[tuple[Any, ...], ...]]


def probe(call: TracedCall) -> Findings:
    """Return what a call's forward is told and what its opaque modules are given.

    It runs as in training, with the same kernels, but its autograd graph keeps no tensor. Buffers,
    inputs, generators and Python attributes are as before afterwards.

    Raises
    ------
    CaptureError
        If the call has fake tensors, which have no values, or differentiates inside its forward.
    """
    listener = _Listener(call)
    with PythonState(call.modules), listener:
        _run(call)
    return listener.findings()


def warm_up(call: TracedCall) -> bool:
    """Run a call's forward once, so that it sets up what it sets up when it first runs.

    Returns whether it drew numbers that no plan can draw; see `PythonState`.

    Modules keep the attributes and hooks they give themselves, and buffers that they make or give
    another shape, such as tables of positions, and what Python and numpy drew for them is drawn;
    all else is as after `probe`.

    Raises
    ------
    CaptureError
        As `probe`.
    """
    with PythonState(call.modules, keeps=True) as state:
        _run(call, keeps=True)
    return state.drew


def draws_outside_torch(call: TracedCall) -> bool:
    """Return whether a call's forward draws numbers that no plan can draw; see `PythonState`.

    Raises
    ------
    CaptureError
        As `probe`.
    """
    with PythonState(call.modules) as state:
        _run(call)
    return state.drew


def _run(call: TracedCall, *, keeps: bool = False) -> None:
    leaves, spec = flatten(call.args, call.kwargs)
    members = [t for m in call.modules.values() for t in (*m.parameters(), *m.buffers())]
    if any(isinstance(t, torch.Tensor) and _is_fake(t) for t in (*leaves, *members)):
        raise CaptureError(
            "the forward must really run once before it can be traced, as what it does depends on "
            "values it computes or on what it sets up when it first runs, and here there are only "
            "shapes: plan it with real tensors (tightfit.prepare)"
        )
    own = [_copy(x) if isinstance(x, torch.Tensor) else x for x in leaves]
    args, kwargs = unflatten(own, spec)
    with (
        fixed_generators(_device_of((*leaves, *members))),
        NumbersAskedFor(tracing=False),
        MasksAskedFor(),
        _own_buffers(call.modules, keeps=keeps) as buffers,
        _Undone([*own, *buffers]),
        torch.autograd.graph.saved_tensors_hooks(_let_go, _refuse_backward),
    ):
        call.function(*args, **kwargs)


def _kept(value: Any) -> torch.Tensor | None:
    """Return an argument if its values may decide something: a copy, it is small."""
    is_tensor = isinstance(value, torch.Tensor)
    if not is_tensor or value.is_floating_point() or value.is_complex():
        return None
    return value.clone()


def _device_of(values: Iterable[Any]) -> torch.device:
    """Return the GPU that a tensor lies on, else the CPU."""
    devices = (t.device for t in values if isinstance(t, torch.Tensor) and t.is_cuda)
    return next(devices, torch.device("cpu"))


def _is_fake(tensor: torch.Tensor) -> bool:
    return tensor.is_meta or private.is_traced(tensor)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _let_go(tensor: torch.Tensor) -> None:
    return None


def _refuse_backward(_: None) -> torch.Tensor:
    raise CaptureError(
        "the forward differentiates inside (torch.autograd.grad) and decides by values it "
        "computes: only one of the two can be planned. Way out: move what decides into a module "
        "of its own, which then runs eagerly, as one op"
    )


@contextlib.contextmanager
def _own_buffers(modules: Mapping[str, nn.Module], *, keeps: bool) -> Iterator[list[torch.Tensor]]:
    """Let modules write into copies of their buffers; yield these.

    Parameters
    ----------
    keeps : bool
        Whether buffers stay that were made anew, or are of another shape now.
    """
    owners = {m: dict(m._buffers) for top in modules.values() for m in top.modules()}
    copies: dict[int, torch.Tensor] = {}
    for module, buffers in owners.items():
        for name, buffer in buffers.items():
            if buffer is not None:
                module._buffers[name] = copies.setdefault(id(buffer), buffer.clone())
    try:
        yield list(copies.values())
    finally:
        for module, buffers in owners.items():
            made = {n: b for n, b in module._buffers.items() if not alike(b, buffers.get(n))}
            module._buffers.clear()
            module._buffers.update(buffers | (made if keeps else {}))


class _Undone(private.TorchDispatchMode):
    """Puts back, in the end, what operators write into tensors that were there before.

    Parameters
    ----------
    own : sequence
        Copies made for the run, which it may change.
    """

    supports_higher_order_operators = True

    def __init__(self, own: Sequence[Any]) -> None:
        super().__init__()
        self._made = {private.storage_key(t) for t in own if isinstance(t, torch.Tensor)}
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)
        with torch.no_grad():
            for tensor, before in self._before.values():
                tensor.copy_(before)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            for tensor in private.pytree.tree_leaves((args, kwargs)):
                self._remember(tensor)
        result = func(*args, **kwargs)
        if schema is None or not any(r.alias_info is not None for r in schema.returns):
            leaves = private.pytree.tree_leaves(result)
            self._made |= {private.storage_key(t) for t in leaves if isinstance(t, torch.Tensor)}
        return result

    def _remember(self, tensor: Any) -> None:
        if isinstance(tensor, torch.Tensor):
            key = private.storage_key(tensor)
            if key not in self._made and key not in self._before:
                whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
                whole = whole.set_(tensor.untyped_storage())
                self._before[key] = whole, whole.clone()


class _Listener(private.TorchDispatchMode):
    """Notes what operators tell, except inside opaque modules."""

    supports_higher_order_operators = True

    def __init__(self, call: TracedCall) -> None:
        super().__init__()
        self._answers: list[Answer] = []
        self._examples: dict[str, list[tuple[Any, ...]]] = {}
        self._opaque = opaque_modules(call.modules, call.opaque)
        self._forwards = SwappedForwards()
        self._depth = 0

    def __enter__(self) -> Any:
        for name, module in self._opaque.items():
            self._forwards.swap(module, self._stand_in(name, module.forward))
        return super().__enter__()

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)
        self._forwards.put_back()

    def findings(self) -> Findings:
        """Return what it was told."""
        examples = {name: tuple(calls) for name, calls in self._examples.items()}
        return Findings(tuple(self._answers), examples)

    def _stand_in(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            leaves = tuple(_kept(x) for x in flatten(args, kwargs)[0])
            self._examples.setdefault(name, []).append(leaves)
            self._depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1

        return forward

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._depth == 0 and is_asking(func, args, kwargs):
            self._answers.append(answer_of(func, result))
        return result
