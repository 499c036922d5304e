"""The operators of a traced forward on a tape: which of them a value follows from, run again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tightfit.capture.decisions.reads import Decisions, Read, TapeSlot, TapeStep, owned, run_step
from tightfit.torch_private import core as private
from tightfit.torch_private.tracing.trees import tree_leaves, tree_map

aten = torch.ops.aten


class Tape:
    """Operators that ran while a forward was traced, in order, and values that Python read.

    Tensors are slots of the tape. Those that are inputs or buffers with values are its leaves:
    tensors that follow from them alone can be computed again.
    """

    def __init__(self) -> None:
        self._slots: Any = private.WeakTensorKeyDictionary()
        self._leaves: dict[int, tuple[int | str, torch.Tensor]] = {}
        self._group: list[int] = []  # by slot: another that may share its memory
        self._steps: list[TapeStep | Read] = []
        self._replayed: set[int] = set()  # the steps that values read follow from

    # -- recording ----------------------------------------------------------------------------

    def add_leaf(self, tensor: torch.Tensor, place: int | str, real: torch.Tensor) -> None:
        """Begin with a traced tensor whose values are known; the last place of a tensor counts.

        `place`: position among the flattened inputs, or qualified name of a buffer.
        """
        self._leaves[self.slot(tensor)] = place, real

    def is_leaf(self, tensor: torch.Tensor) -> bool:
        """Whether the values of a traced tensor were given."""
        return self.slot(tensor) in self._leaves

    def slot(self, tensor: Any) -> int:
        number = self._slots.get(tensor)
        if number is None:
            number = self._slots[tensor] = len(self._group)
            self._group.append(number)
        return number

    def step_of(self, func: Any, args: tuple[Any, ...], kwargs: Any, result: Any) -> TapeStep:
        """Return a run of an operator as a step, without recording it."""

        def slot_of(x: Any) -> Any:
            traced = isinstance(x, torch.Tensor) and not has_values(x)
            return TapeSlot(self.slot(x)) if traced else x

        args, kwargs = tree_map(slot_of, (args, kwargs))
        outputs = tuple(
            self.slot(x) if isinstance(x, torch.Tensor) else None for x in tree_leaves(result)
        )
        return TapeStep(func, args, kwargs, outputs)

    def note(self, func: Any, args: tuple[Any, ...], kwargs: Any, result: Any) -> None:
        step = self.step_of(func, args, kwargs, result)
        if func is aten.lift_fresh.default:  # a constant: writing to it must not change it
            step = replace(step, function=aten.clone.default)
        self._steps.append(step)
        if _aliases(func):
            joined = [*step.slots(), *(o for o in step.outputs if o is not None)]
            for slot in joined[1:]:
                self._group[self._root(slot)] = self._root(joined[0])

    def _root(self, slot: int) -> int:
        while self._group[slot] != slot:
            slot = self._group[slot]
        return slot

    # -- asking -------------------------------------------------------------------------------

    def history(self, slots: set[int]) -> set[int] | None:
        """Return the steps that the values of slots follow from; None if they cannot be known."""
        wanted = {self._root(slot) for slot in slots}
        found: set[int] = set()
        for index in range(len(self._steps) - 1, -1, -1):
            step = self._steps[index]
            if not isinstance(step, TapeStep):
                continue
            touched = [o for o in step.outputs if o is not None]
            if may_write(step.function):
                touched += list(step.slots())
            if any(self._root(t) in wanted for t in touched):
                if not _is_repeatable(step.function):
                    return None
                found.add(index)
                wanted |= {self._root(s) for s in step.slots()}
        steps = self._only(found)
        made = {o for s in steps for o in s.outputs}
        used = {n for s in steps for n in s.slots()} | slots
        return found if used - made <= self._leaves.keys() else None

    def replay(self, step: TapeStep, history: set[int]) -> Any:
        """Return the result of a step on the leaves' values, after those it follows from."""
        steps = self._only(history)
        used = {n for s in (*steps, step) for n in s.slots()}
        with private.without_modes(), torch.no_grad(), private.without_autocast():
            tensors = {
                n: owned(self._leaves[n][1], copied=True) for n in used & self._leaves.keys()
            }
            for each in steps:
                run_step(each, tensors)
            return step.result(tensors)

    def _only(self, places: set[int]) -> list[TapeStep]:
        return [s for i, s in enumerate(self._steps) if i in places and isinstance(s, TapeStep)]

    # -- values read --------------------------------------------------------------------------

    def check(self, step: TapeStep, history: set[int], value: Any) -> None:
        """Let later calls check a number, if it depends on inputs or buffers at all."""
        if self._reads_leaf(step, history):
            self._replayed |= history
            self._steps.append(Read(step, value))

    def _reads_leaf(self, step: TapeStep, history: set[int]) -> bool:
        return any(n in self._leaves for s in (*self._only(history), step) for n in s.slots())

    def decisions(self) -> Decisions:
        """Return values read, and the steps they follow from."""
        steps = [
            step
            for index, step in enumerate(self._steps)
            if isinstance(step, Read) or index in self._replayed
        ]
        used = {slot for s in steps if isinstance(s, TapeStep) for slot in s.slots()}
        used |= {slot for s in steps if isinstance(s, Read) for slot in s.step.slots()}
        written = {
            self._root(slot)
            for s in steps
            if isinstance(s, TapeStep) and may_write(s.function)
            for slot in s.slots()
        }
        leaves = {slot: place for slot, (place, _) in self._leaves.items() if slot in used}
        copied = frozenset(slot for slot in leaves if self._root(slot) in written)
        return Decisions(tuple(steps), leaves, copied)


def has_values(value: Any) -> bool:
    """Whether something is a tensor with values: neither fake nor wrapped."""
    if not isinstance(value, torch.Tensor) or value.device.type == "meta":
        return False
    return not private.is_traced(value)


def may_write(function: Any) -> bool:
    schema = getattr(function, "_schema", None)
    return schema is None or schema.is_mutable


def _is_repeatable(function: Any) -> bool:
    """Whether running an operator again gives the same values."""
    if not isinstance(function, private.OpOverload):
        return False
    return torch.Tag.nondeterministic_seeded not in function.tags


def _aliases(function: Any) -> bool:
    """Whether outputs may share memory with arguments."""
    schema = getattr(function, "_schema", None)
    if schema is None:
        return True
    return any(r.alias_info is not None for r in schema.returns)
