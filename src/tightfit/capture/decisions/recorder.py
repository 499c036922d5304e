"""Follow the operators of a traced forward, and answer for the values it asks for in Python."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tightfit.capture.calls.geometry import Geometry
from tightfit.capture.calls.structure import flatten
from tightfit.capture.decisions.answers import (
    Answer,
    Question,
    answer_of,
    is_asking,
    refuse_drawn,
    refuse_measure,
    selected_from,
)
from tightfit.capture.decisions.reads import (
    Decisions,
    Read,
    Slot,
    Step,
    is_drawn,
    is_repeatable,
    itself,
    owned,
    run_step,
)
from tightfit.capture.origins import ModuleTrail
from tightfit.errors import CaptureError
from tightfit.torch_private import core as private

__all__ = ["DecisionRecorder"]

aten = torch.ops.aten

# A uniform draw lies in [0, 1): comparing it with a number outside has one answer, whatever it is.
_COMPARISONS = {
    aten.lt.Scalar: operator.lt,
    aten.le.Scalar: operator.le,
    aten.gt.Scalar: operator.gt,
    aten.ge.Scalar: operator.ge,
}
_LARGEST_UNIFORM = 1.0 - 2.0**-53


class DecisionRecorder(private.TorchDispatchMode):
    """Notes every operator of a traced forward, and answers for values read in Python.

    Parameters
    ----------
    inputs : sequence
        The flattened inputs, real tensors where values are to be known.
    modules : mapping of str to nn.Module
        The modules of the step.
    trail : ModuleTrail
        Knows which module is running.
    answers : sequence of Answer, optional
        What the forward was told, one operator after the other, in a real run.
    answered : frozenset of str
        The inner modules that are told too, besides the outermost.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        inputs: Sequence[Any],
        modules: Mapping[str, nn.Module],
        trail: ModuleTrail,
        answers: Sequence[Answer] | None = None,
        answered: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__()
        self._inputs = inputs
        self._trail = trail
        self._answers = answers
        self._answered = answered | {""}
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
        self._tape: list[Step | Read] = []
        self._uniform: set[int] = set()
        self._read_steps: set[int] = set()
        self._told = 0
        self.questions: list[Question] = []
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
        self._refuse_writing_outside(func, args)
        if is_asking(func, args, kwargs):
            return self._ask(func, args, kwargs)
        self._note(func, args, kwargs, result := func(*args, **kwargs))
        return result

    def _refuse_writing_outside(self, func: Any, args: tuple[Any, ...]) -> None:
        """Refuse to write into a tensor that has values: it would happen while tracing."""
        if _is_mutable(func) and args and _is_real(args[0]):
            raise CaptureError(
                f"module {self._trail.running!r} writes ({func}) into a tensor of shape "
                f"{list(args[0].shape)} that is neither a parameter, a buffer nor an input. Way "
                "out: self.register_buffer(name, tensor, persistent=False)",
                cause="outside",
            )

    def decisions(self) -> Decisions:
        """Return what was read since the last start."""
        steps = [
            step
            for index, step in enumerate(self._tape)
            if isinstance(step, Read) or index in self._read_steps
        ]
        used = {slot for s in steps if isinstance(s, Step) for slot in s.slots()}
        used |= {slot for s in steps if isinstance(s, Read) for slot in s.step.slots()}
        written = {
            self._root(slot)
            for s in steps
            if isinstance(s, Step) and _is_mutable(s.function)
            for slot in s.slots()
        }
        leaves = {slot: place for slot, place in self._leaves.items() if slot in used}
        copied = frozenset(slot for slot in leaves if self._root(slot) in written)
        return Decisions(tuple(steps), leaves, copied)

    def known_value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return what a traced tensor is, if it follows from inputs and buffers alone."""
        slot = self._slot(tensor)
        needed = self._history({slot})
        return None if needed is None else self._replayed(itself(slot), needed)

    def values_of(self, tensor: torch.Tensor) -> list[int]:
        """Return the values of a traced tensor of integers; later calls check them.

        Raises
        ------
        CaptureError
            If they do not follow from inputs and buffers alone.
        """
        slot = self._slot(tensor)
        needed = self._history({slot})
        if needed is None:
            raise CaptureError(
                f"{tensor.numel()} lengths of packed sequences depend on values that are computed "
                "here. Way out: move packing, recurrent module and unpacking into one module and "
                "mark it with tightfit.opaque",
                module=self._trail.running,
            )
        read = itself(slot)
        values = self._replayed(read, needed).tolist()
        if self._reads_leaf(read, needed):
            self._read_steps |= needed
            for place, value in enumerate(values):
                one = self._new_slot()
                step = Step(aten.select.int, (Slot(slot), 0, place), {}, (one,))
                self._read_steps.add(len(self._tape))
                self._tape.append(step)
                number = aten._local_scalar_dense.default
                told = Answer(number.name(), value)
                self._tape.append(Read(Step(number, (Slot(one),), {}, (None,)), told))
        return values

    # -- recording ----------------------------------------------------------------------------

    def _slot(self, tensor: Any) -> int:
        number = self._slots.get(tensor)
        if number is None:
            number = self._slots[tensor] = self._new_slot()
        return number

    def _new_slot(self) -> int:
        self._group.append(len(self._group))
        return len(self._group) - 1

    def _root(self, slot: int) -> int:
        while self._group[slot] != slot:
            slot = self._group[slot]
        return slot

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: Any, result: Any) -> None:
        step = self._step(func, args, kwargs, result)
        if func is aten.lift_fresh.default:  # a constant: writing to it must not change it
            step = replace(step, function=aten.clone.default)
        elif func is aten.rand.default:
            self._uniform.update(o for o in step.outputs if o is not None)
        elif func in _COMPARISONS and self._is_settled(func, step.args):
            answer = _COMPARISONS[func](0.0, args[1])
            step = Step(aten.full.default, (list(result.shape), answer), {}, step.outputs)
        self._tape.append(step)
        if _aliases(func):
            joined = [*step.slots(), *(o for o in step.outputs if o is not None)]
            for slot in joined[1:]:
                self._group[self._root(slot)] = self._root(joined[0])

    def _step(self, func: Any, args: tuple[Any, ...], kwargs: Any, result: Any) -> Step:
        def slot_of(x: Any) -> Any:
            traced = isinstance(x, torch.Tensor) and not _is_real(x)
            return Slot(self._slot(x)) if traced else x

        args, kwargs = private.pytree.tree_map(slot_of, (args, kwargs))
        outputs = tuple(
            self._slot(x) if isinstance(x, torch.Tensor) else None
            for x in private.pytree.tree_leaves(result)
        )
        return Step(func, args, kwargs, outputs)

    def _is_settled(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether a uniform draw is compared with a number that leaves no doubt."""
        drawn, bound = args
        if not isinstance(drawn, Slot) or drawn.number not in self._uniform:
            return False
        compare = _COMPARISONS[func]
        return compare(0.0, bound) == compare(_LARGEST_UNIFORM, bound)

    # -- reading ------------------------------------------------------------------------------

    def _ask(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Answer for an operator that tells Python something about values."""
        step = self._step(func, args, kwargs, None)
        told = self._next_answer(func, args)
        selected = selected_from(func, args)
        asked = set(map(self._slot, selected[1]) if selected else step.slots())
        needed = self._history(asked)
        if needed is None and (told is None or self._trail.running not in self._answered):
            if func is aten._local_scalar_dense.default and is_drawn(self._tape, asked):
                refuse_drawn(self._trail.running)
            return func(*args, **kwargs)  # fails: it is unknown, or an inner module's business
        if needed is None:
            assert told is not None
            answer = told
            refuse_measure(answer, self._trail.last)
        elif selected:
            answer = self._selected(step, needed, *selected)
        else:
            answer = self._learned(step, needed)
        if needed is not None and not isinstance(answer.value, tuple):
            return answer.value
        result = self._put(func, args, kwargs, answer, known=needed is not None and not selected)
        if needed is not None and func is aten._pack_padded_sequence.default:
            self._note_batch_sizes(args, result[1])
        return result

    def _note_batch_sizes(self, args: tuple[Any, ...], sizes: torch.Tensor) -> None:
        """Note that batch sizes follow from lengths alone, not from what is packed."""
        narrow = self._new_slot()
        shape = [*args[0].shape[:2], 1]
        self._tape.append(Step(aten.zeros.default, (shape,), {}, (narrow,)))
        given = (Slot(narrow), Slot(self._slot(args[1])), *args[2:])
        outputs = (None, self._slot(sizes))
        self._tape.append(Step(aten._pack_padded_sequence.default, given, {}, outputs))

    def _put(
        self, func: Any, args: tuple[Any, ...], kwargs: Any, answer: Answer, *, known: bool
    ) -> Any:
        """Put a question into the trace, for every step to check its answer."""
        leaves, spec = flatten((args, kwargs))
        question = Question(func, leaves, spec, answer)
        self.questions.append(question)
        results = question.asked([x for x in leaves if isinstance(x, torch.Tensor)])
        if not isinstance(answer.value, tuple):
            return answer.value
        result = results[0] if len(results) == 1 else tuple(results)
        if known:
            self._note(func, args, kwargs, result)
        return result

    def _next_answer(self, func: Any, args: tuple[Any, ...]) -> Answer | None:
        """Return what this operator was told in the real run, if there was one."""
        if self._answers is None:
            return None
        answer = self._answers[self._told] if self._told < len(self._answers) else None
        self._told += 1
        if answer is None or not answer.is_to(func, args):
            raise CaptureError(
                f"the forward asked for {answer.operator if answer else 'nothing'} when it ran, "
                f"but for {func.name()} when it was traced: what it runs depends on more than "
                "its tensors. Way out: move the part that decides out of the fitted module"
            )
        return answer

    def _learned(self, step: Step, needed: set[int]) -> Answer:
        """Run the steps that a question follows from on the real inputs; return the answer."""
        result = self._replayed(step, needed)
        answer = answer_of(step.function, result)
        self._tell(step, needed, answer)
        return answer

    def _selected(self, step: Step, needed: set[int], x: Any, masks: list[Any]) -> Answer:
        """Return how large a selection by masks is, which no value but theirs decides."""
        known: dict[int, Any] = {}
        for mask in masks:
            slot = self._slot(mask)
            history = self._history({slot})
            assert history is not None
            known[slot] = self._replayed(itself(slot), history)
            total = self._new_slot()
            count = len(self._tape)
            self._tape.append(Step(aten.sum.default, (Slot(slot),), {}, (total,)))
            read = Step(aten._local_scalar_dense.default, (Slot(total),), {}, (None,))
            self._learned(read, {*history, count})
        with private.without_modes(), torch.no_grad():
            known[self._slot(x)] = Geometry.of(x).empty()
            rest = {n: torch.zeros((), dtype=torch.long) for n in step.slots() if n not in known}
            return answer_of(step.function, step.result(known | rest))

    def _tell(self, step: Step, needed: set[int], answer: Answer) -> None:
        """Let later calls check an answer, if it depends on inputs or buffers at all."""
        if self._reads_leaf(step, needed):
            self._read_steps |= needed
            self._tape.append(Read(step, answer))

    def _reads_leaf(self, step: Step, needed: set[int]) -> bool:
        steps = [s for i, s in enumerate(self._tape) if i in needed and isinstance(s, Step)]
        return any(n in self._leaves for s in (*steps, step) for n in s.slots())

    def _replayed(self, step: Step, needed: set[int]) -> Any:
        """Return the result of a step on the real inputs, after those it follows from."""
        steps = [s for i, s in enumerate(self._tape) if i in needed and isinstance(s, Step)]
        used = {n for s in (*steps, step) for n in s.slots()}
        with private.without_modes(), torch.no_grad(), private.without_autocast():
            tensors = {n: owned(self._known(n), copied=True) for n in used & self._leaves.keys()}
            for each in steps:
                run_step(each, tensors)
            return step.result(tensors)

    def _known(self, leaf: int) -> torch.Tensor:
        place = self._leaves[leaf]
        return self._inputs[place] if isinstance(place, int) else self._buffers[place]

    def _history(self, slots: set[int]) -> set[int] | None:
        """Return the steps that the values of slots follow from; None if they cannot be known."""
        wanted = {self._root(slot) for slot in slots}
        found: set[int] = set()
        for index in range(len(self._tape) - 1, -1, -1):
            step = self._tape[index]
            if not isinstance(step, Step):
                continue
            touched = [o for o in step.outputs if o is not None]
            if _is_mutable(step.function):
                touched += list(step.slots())
            if any(self._root(t) in wanted for t in touched):
                if not is_repeatable(step.function):
                    return None
                found.add(index)
                wanted |= {self._root(s) for s in step.slots()}
        steps = [s for i, s in enumerate(self._tape) if i in found and isinstance(s, Step)]
        made = {o for s in steps for o in s.outputs}
        used = {n for s in steps for n in s.slots()} | slots
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
