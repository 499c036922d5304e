"""Records a PyTorch program while it runs: its ops, their bytes and times, its frees.

A name of the log means a storage, or for a view of it with its own sizes and strides. It is
released when the storage is not held any more: no tensor and no graph of autograd.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch

from tightfit.errors import BadInput
from tightfit.eviction.log.instructions import (
    Backward,
    Call,
    Constant,
    Instruction,
    Mutate,
    Release,
    Result,
)
from tightfit.torch_private import core as private
from tightfit.torch_private import engine

_Geometry: TypeAlias = tuple[Any, ...]


class _Known:
    """A storage that has a name, and the names of its views by their geometry.

    `root`: the geometry of the tensor that it was met as.
    """

    def __init__(self, name: str, root: _Geometry) -> None:
        self.name = name
        self.root = root
        self._views: dict[_Geometry, str] = {}

    def name_of(self, geometry: _Geometry) -> str | None:
        return self.name if geometry == self.root else self._views.get(geometry)

    def add(self, geometry: _Geometry, name: str) -> None:
        self._views[geometry] = name

    def without_views(self) -> list[str]:
        """Forget the views; return their names."""
        names = [name for name in self._views.values() if name != self.name]
        self._views.clear()
        return names


class _Ending:
    """Attached to a storage; calls back when the storage ends."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end

    def __del__(self) -> None:
        self._on_end()


class Recorder(private.TorchDispatchMode):
    """Records the ops that run while it is entered.

    `step`: record only operators from the end of the previous optimizer step to the beginning of
    this step: forward and backward of one training step. None: everything.
    """

    def __init__(self, step: int | None = None) -> None:
        super().__init__()
        self.steps = 0
        self._step = step
        self._is_on = step in (None, 1)
        self._constants: list[Constant] = []
        self._instructions: list[Instruction] = []
        self._known: dict[int, _Known] = {}
        self._names = 0
        self._is_backward = False
        self._hooks: list[Any] = []

    def instructions(self) -> list[Instruction]:
        """Return the record, tensors that existed before first.

        Raises `BadInput` if nothing was.
        """
        if not any(isinstance(instruction, Call) for instruction in self._instructions):
            asked = "" if self._step is None else f" in optimizer step {self._step}"
            raise BadInput(f"no operator ran{asked}; the program made {self.steps} optimizer steps")
        return [*self._constants, *self._instructions]

    def __enter__(self) -> Recorder:
        if self._step is not None:
            from torch.optim import optimizer

            self._hooks = [
                optimizer.register_optimizer_step_pre_hook(self._before_step),
                optimizer.register_optimizer_step_post_hook(self._after_step),
            ]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._is_on = False
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*error)

    def _before_step(self, *_: Any) -> None:
        self._is_on = False

    def _after_step(self, *_: Any) -> None:
        self.steps += 1
        self._is_on = self._step is not None and self.steps == self._step - 1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._is_on:
            return func(*args, **kwargs)
        if engine.in_backward() and not self._is_backward:
            self._is_backward = True
            self._instructions.append(Backward())
        inputs = _tensors((args, kwargs))
        names = [self._named(tensor, func) for tensor in inputs]
        written = _written(func, args, kwargs, inputs)
        started = time.perf_counter_ns()
        outputs = func(*args, **kwargs)
        for tensor in inputs:
            if tensor.is_cuda:
                torch.cuda.synchronize(tensor.device)
        self._write(func, inputs, names, written, outputs, time.perf_counter_ns() - started)
        return outputs

    def _write(
        self,
        func: Any,
        inputs: Sequence[torch.Tensor],
        names: list[str],
        written: Sequence[int],
        outputs: Any,
        time_ns: int,
    ) -> None:
        made = _tensors(outputs)
        results = [r for tensor in made for r in self._result(tensor, inputs, func)]
        if results or (not made and not written):
            self._instructions.append(Call(str(func), tuple(names), tuple(results), time_ns))
            time_ns = 0
        if not written:
            return
        stale: list[str] = []
        for position in written:  # of the whole storage: its views see the new content
            known = self._known[private.storage_key(inputs[position])]
            names[position] = known.name
            stale += known.without_views()
        first = [p for p in written if p == names.index(names[p])]
        self._instructions.append(Mutate(str(func), tuple(names), tuple(first), time_ns))
        self._instructions += map(Release, stale)

    def _result(
        self, tensor: torch.Tensor, inputs: Sequence[torch.Tensor], func: Any
    ) -> list[Result]:
        """The result that an output is: none if it has a name already."""
        _check(tensor, func)
        key, geometry = private.storage_key(tensor), _geometry(tensor)
        known = self._known.get(key)
        if known is None:
            name = self._learn(tensor, "x")
            return [Result(name, tensor.untyped_storage().nbytes())]
        if known.name_of(geometry) is not None:
            return []
        keys = [private.storage_key(other) for other in inputs]
        if key not in keys:  # a second view of a storage that this op has made
            known.add(geometry, known.name)
            return []
        name = self._new_name("v")
        known.add(geometry, name)
        return [Result(name, tensor.untyped_storage().nbytes(), keys.index(key))]

    def _named(self, tensor: torch.Tensor, func: Any) -> str:
        """The name of an input; an input that no operator made exists from the beginning."""
        _check(tensor, func)
        known = self._known.get(private.storage_key(tensor))
        if known is None:
            name = self._learn(tensor, "c")
            self._constants.append(Constant(name, tensor.untyped_storage().nbytes()))
            return name
        return known.name_of(_geometry(tensor)) or known.name

    def _learn(self, tensor: torch.Tensor, letter: str) -> str:
        name, key = self._new_name(letter), private.storage_key(tensor)
        self._known[key] = _Known(name, _geometry(tensor))
        setattr(tensor.untyped_storage(), f"tightfit_{id(self)}", _Ending(lambda: self._end(key)))
        return name

    def _end(self, key: int) -> None:
        known = self._known.pop(key)
        if self._is_on:
            self._instructions += map(Release, [*known.without_views(), known.name])

    def _new_name(self, letter: str) -> str:
        self._names += 1
        return f"{letter}{self._names}"


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in private.pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _written(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], inputs: Sequence[torch.Tensor]
) -> list[int]:
    """Positions of the inputs that an op overwrites."""
    schema = func._schema.arguments
    given: Iterable[tuple[Any, Any]] = [
        *zip(schema, args, strict=False),
        *((argument, kwargs[argument.name]) for argument in schema if argument.name in kwargs),
    ]
    overwritten = {
        id(tensor)
        for argument, value in given
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in _tensors(value)
    }
    return [n for n, tensor in enumerate(inputs) if id(tensor) in overwritten]


def _check(tensor: torch.Tensor, func: Any) -> None:
    if tensor.layout != torch.strided:
        raise BadInput(f"{func} has a tensor of layout {tensor.layout}; a log holds strided ones")


def _geometry(tensor: torch.Tensor) -> _Geometry:
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
