"""Values a step reads in Python, and the check that they still hold at a later call.

A forward may ask a tensor for its value to decide what to run: is there any padding in this mask,
are these positions consecutive? What it asks usually follows from the inputs alone, in a few cheap
operators. Those are recorded while the step is traced and run on the real inputs: the trace goes
on with the true answer, and every later call runs them again and uses this graph only if all
answers are the same. A value that depends on a parameter or on random numbers cannot be known
beforehand; the trace then fails as it would without this.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tightfit.capture import _torch as private

__all__ = ["DecisionRecorder", "Decisions"]

aten = torch.ops.aten

# A uniform draw lies in [0, 1): comparing it with a number outside has one answer, whatever it is.
_COMPARISONS = {
    aten.lt.Scalar: operator.lt,
    aten.le.Scalar: operator.le,
    aten.gt.Scalar: operator.gt,
    aten.ge.Scalar: operator.ge,
}
_LARGEST_UNIFORM = 1.0 - 2.0**-53


@dataclass(frozen=True)
class _Slot:
    """Stands for a tensor among the arguments of a recorded operator."""

    number: int


@dataclass(frozen=True)
class _Step:
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[int | None, ...]

    def slots(self) -> Iterator[int]:
        """Yield the slots among the arguments."""
        for leaf in private.pytree.tree_leaves((self.args, self.kwargs)):
            if isinstance(leaf, _Slot):
                yield leaf.number


@dataclass(frozen=True)
class _Read:
    slot: int
    value: Any


@dataclass(frozen=True)
class Decisions:
    """What a traced step read in Python, and how to compute it again.

    Parameters
    ----------
    steps : tuple of _Step or _Read
        Operators on inputs and buffers, and the values read from them, in order.
    leaves : dict of int to (int or str)
        The slots that are inputs (their position) or buffers (their qualified name).
    copied : frozenset of int
        Leaves that a step writes to: each check works on a copy.
    """

    steps: tuple[_Step | _Read, ...] = ()
    leaves: Mapping[int, int | str] = field(default_factory=dict)
    copied: frozenset[int] = frozenset()

    @property
    def values(self) -> tuple[Any, ...]:
        """What was read."""
        return tuple(step.value for step in self.steps if isinstance(step, _Read))

    def hold(self, inputs: Sequence[Any], modules: Mapping[str, nn.Module]) -> bool:
        """Whether the same values would be read with other inputs.

        Parameters
        ----------
        inputs : sequence
            The flattened inputs of the call.
        modules : mapping of str to nn.Module
            The modules of the step.
        """
        if not self.steps:
            return True
        tensors: dict[int, torch.Tensor] = {}
        for slot, place in self.leaves.items():
            if isinstance(place, int):
                tensor = inputs[place]
            else:
                prefix, _, name = place.partition(".")
                tensor = modules[prefix].get_buffer(name)
            tensors[slot] = _own(tensor, copied=slot in self.copied)
        with torch.no_grad(), private.without_autocast():
            for step in self.steps:
                if isinstance(step, _Step):
                    _run(step, tensors)
                elif not _same(tensors[step.slot].item(), step.value):
                    return False
        return True


def _own(tensor: torch.Tensor, *, copied: bool) -> torch.Tensor:
    return tensor.detach().clone() if copied else tensor.detach()


def _run(step: _Step, tensors: dict[int, torch.Tensor]) -> None:
    args, kwargs = private.pytree.tree_map(
        lambda x: tensors[x.number] if isinstance(x, _Slot) else x, (step.args, step.kwargs)
    )
    outputs = private.pytree.tree_leaves(step.function(*args, **kwargs))
    for slot, output in zip(step.outputs, outputs, strict=True):
        if slot is not None:
            tensors[slot] = output


def _same(a: Any, b: Any) -> bool:
    return a == b or (a != a and b != b)


class DecisionRecorder(private.TorchDispatchMode):
    """Notes every operator of a traced forward, and answers for values read in Python.

    Parameters
    ----------
    inputs : sequence
        The flattened inputs, real tensors where values are to be known.
    modules : mapping of str to nn.Module
        The modules of the step.
    """

    supports_higher_order_operators = True

    def __init__(self, inputs: Sequence[Any], modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._inputs = inputs
        self._buffers = {
            f"{prefix}.{name}": buffer
            for prefix, module in modules.items()
            for name, buffer in module.named_buffers(remove_duplicate=False)
        }
        self.start((), {})

    def start(self, leaves: Sequence[Any], modules: Mapping[str, nn.Module]) -> None:
        """Begin anew: the tracer runs the forward several times.

        Parameters
        ----------
        leaves : sequence
            What the tracer gives for the inputs.
        modules : mapping of str to nn.Module
            The modules, with what the tracer put in place of their buffers.
        """
        self._slots: Any = private.WeakTensorKeyDictionary()
        self._leaves: dict[int, int | str] = {}
        self._group: list[int] = []
        self._tape: list[_Step | _Read] = []
        self._uniform: set[int] = set()
        self._read_steps: set[int] = set()
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and _is_real(self._inputs[position]):
                self._leaves[self._slot(leaf)] = position
        for prefix, module in modules.items():
            for name, buffer in module.named_buffers(remove_duplicate=False):
                if _is_real(self._buffers.get(f"{prefix}.{name}")):
                    self._leaves.setdefault(self._slot(buffer), f"{prefix}.{name}")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default:
            known, value = self._read(args[0])
            return value if known else func(*args, **kwargs)
        result = func(*args, **kwargs)
        self._note(func, args, kwargs, result)
        return result

    def decisions(self) -> Decisions:
        """Return what was read since the last start."""
        steps = [
            step
            for index, step in enumerate(self._tape)
            if isinstance(step, _Read) or index in self._read_steps
        ]
        used = {slot for s in steps if isinstance(s, _Step) for slot in s.slots()}
        used |= {s.slot for s in steps if isinstance(s, _Read)}
        written = {
            self._root(slot)
            for s in steps
            if isinstance(s, _Step) and _is_mutable(s.function)
            for slot in s.slots()
        }
        leaves = {slot: place for slot, place in self._leaves.items() if slot in used}
        copied = frozenset(slot for slot in leaves if self._root(slot) in written)
        return Decisions(tuple(steps), leaves, copied)

    # -- recording ----------------------------------------------------------------------------

    def _slot(self, tensor: Any) -> int:
        number = self._slots.get(tensor)
        if number is None:
            number = self._slots[tensor] = len(self._group)
            self._group.append(number)
        return number

    def _root(self, slot: int) -> int:
        while self._group[slot] != slot:
            slot = self._group[slot]
        return slot

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: Any, result: Any) -> None:
        def slot_of(x: Any) -> Any:
            traced = isinstance(x, torch.Tensor) and not _is_real(x)
            return _Slot(self._slot(x)) if traced else x

        args, kwargs = private.pytree.tree_map(slot_of, (args, kwargs))
        outputs = tuple(
            self._slot(x) if isinstance(x, torch.Tensor) else None
            for x in private.pytree.tree_leaves(result)
        )
        step = _Step(func, args, kwargs, outputs)
        if func is aten.lift_fresh.default:  # a constant: writing to it must not change it
            step = _Step(aten.clone.default, args, kwargs, outputs)
        elif func is aten.rand.default:
            self._uniform.update(o for o in outputs if o is not None)
        elif func in _COMPARISONS and self._is_settled(func, args):
            answer = _COMPARISONS[func](0.0, args[1])
            step = _Step(aten.full.default, (list(result.shape), answer), {}, outputs)
        self._tape.append(step)
        if _aliases(func):
            joined = [*step.slots(), *(o for o in outputs if o is not None)]
            for slot in joined[1:]:
                self._group[self._root(slot)] = self._root(joined[0])

    def _is_settled(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether a uniform draw is compared with a number that leaves no doubt."""
        drawn, bound = args
        if not isinstance(drawn, _Slot) or drawn.number not in self._uniform:
            return False
        compare = _COMPARISONS[func]
        return compare(0.0, bound) == compare(_LARGEST_UNIFORM, bound)

    # -- reading ------------------------------------------------------------------------------

    def _read(self, tensor: Any) -> tuple[bool, Any]:
        """Return whether a value follows from inputs and buffers alone, and the value."""
        slot = self._slot(tensor)
        needed = self._history(slot)
        if needed is None:
            return False, None
        steps = [s for i, s in enumerate(self._tape) if i in needed and isinstance(s, _Step)]
        used = {n for s in steps for n in s.slots()} | {slot}
        with private.without_modes(), torch.no_grad(), private.without_autocast():
            tensors = {n: _own(self._known(n), copied=True) for n in used & self._leaves.keys()}
            for step in steps:
                _run(step, tensors)
            value = tensors[slot].item()
        if any(n in self._leaves for n in used):
            self._read_steps |= needed
            self._tape.append(_Read(slot, value))
        return True, value

    def _known(self, leaf: int) -> torch.Tensor:
        place = self._leaves[leaf]
        return self._inputs[place] if isinstance(place, int) else self._buffers[place]

    def _history(self, slot: int) -> set[int] | None:
        """Return the steps that a slot's value follows from; None if it cannot be known."""
        wanted = {self._root(slot)}
        found: set[int] = set()
        for index in range(len(self._tape) - 1, -1, -1):
            step = self._tape[index]
            if not isinstance(step, _Step):
                continue
            touched = [o for o in step.outputs if o is not None]
            if _is_mutable(step.function):
                touched += list(step.slots())
            if any(self._root(t) in wanted for t in touched):
                if not _is_repeatable(step.function):
                    return None
                found.add(index)
                wanted |= {self._root(s) for s in step.slots()}
        steps = [s for i, s in enumerate(self._tape) if i in found and isinstance(s, _Step)]
        made = {o for s in steps for o in s.outputs}
        used = {n for s in steps for n in s.slots()} | {slot}
        return found if used - made <= self._leaves.keys() else None


def _is_real(value: Any) -> bool:
    """Whether a tensor has values: a plain one, no fake or wrapped one."""
    if not isinstance(value, torch.Tensor) or value.device.type == "meta":
        return False
    return not private.is_traced(value)


def _is_mutable(function: Any) -> bool:
    schema = getattr(function, "_schema", None)
    return schema is None or schema.is_mutable


def _aliases(function: Any) -> bool:
    """Whether outputs may share memory with arguments."""
    schema = getattr(function, "_schema", None)
    if schema is None:
        return True
    return any(r.alias_info is not None for r in schema.returns)


def _is_repeatable(function: Any) -> bool:
    """Whether running an operator again gives the same values."""
    if not isinstance(function, torch._ops.OpOverload):
        return False
    return torch.Tag.nondeterministic_seeded not in function.tags
