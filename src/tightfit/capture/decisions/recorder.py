"""Follow the operators of a traced forward, and answer for the values it asks for in Python."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
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
    selected_from,
)
from tightfit.capture.decisions.numbers import Numbers
from tightfit.capture.decisions.reads import Decisions, TapeSlot, TapeStep, itself
from tightfit.capture.decisions.tape import Tape, has_values, may_write
from tightfit.capture.nodes import draws
from tightfit.capture.origins import ModuleTrail
from tightfit.errors import CaptureError
from tightfit.torch_private import core as private

__all__ = ["DecisionRecorder", "GraphRecorder"]

aten = torch.ops.aten


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
    numbers : Numbers, optional
        Takes numbers that are asked for as inputs of the step.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        inputs: Sequence[Any],
        modules: Mapping[str, nn.Module],
        trail: ModuleTrail,
        answers: Sequence[Answer] | None = None,
        answered: frozenset[str] = frozenset(),
        numbers: Numbers | None = None,
    ) -> None:
        super().__init__()
        self._inputs = inputs
        self._numbers = numbers
        self._trail = trail
        self._answers = answers
        self._answered = answered | {""}
        self._buffers = {
            f"{prefix}.{name}": buffer
            for prefix, module in modules.items()
            for name, buffer in module.named_buffers(remove_duplicate=False)
        }
        self._generators: list[Any] = []
        self._runs = -1
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
        self._tape = Tape()
        self._told = 0
        self._seeded = _seeded()
        self._random = random.getstate()
        self._generators_before, self._generators = self._generators, []
        self._runs += 1
        if self._numbers is not None:
            self._numbers.start()
        self.questions: list[Question] = []
        for position, leaf in enumerate(leaves):
            real = self._inputs[position]
            if isinstance(leaf, torch.Tensor) and has_values(real):
                self._tape.add_leaf(leaf, position, real)
        for prefix, module in modules.items():
            for name, buffer in module.named_buffers(remove_duplicate=False):
                real: Any = self._buffers.get(f"{prefix}.{name}")
                if has_values(real) and not self._tape.is_leaf(buffer):
                    self._tape.add_leaf(buffer, f"{prefix}.{name}", real)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self._refuse_writing_outside(func, args)
        self._after_python()
        if draws(func, args, kwargs):
            self.refuse_seeding()
            self._note_generator(kwargs.get("generator"))
        if is_asking(func, args, kwargs):
            return self._ask(func, args, kwargs)
        self._tape.note(func, args, kwargs, result := func(*args, **kwargs))
        return result

    def _after_python(self) -> None:
        """Look at what the Python between two operators has done."""
        self._refuse_python_draws()

    def _refuse_python_draws(self) -> None:
        """Refuse as soon as Python's generator was drawn from: what follows need not be traced."""
        if random.getstate() != self._random:
            raise CaptureError(
                f"module {self._trail.running!r} draws from Python's random module: a planned "
                "step replays operators, not Python, so this would silently stop happening. Way "
                "out: draw outside the fitted module, or draw random numbers with torch. The model "
                "is unchanged",
                module=self._trail.running,
                cause="state",
            )

    def refuse_seeding(self) -> None:
        """Refuse a forward that has seeded PyTorch's generator: a plan draws on from where it is.

        While a forward is traced nothing is drawn, so that the state is that of its start.

        Raises
        ------
        CaptureError
            Names the module that was running.
        """
        if self._seeded != _seeded():
            raise CaptureError(
                f"module {self._trail.running!r} seeds PyTorch's generator (torch.manual_seed, "
                "set_rng_state): a planned step draws on from where the generator is. Way out: "
                "seed it outside of the fitted module, or draw once and keep it as a buffer",
                module=self._trail.running,
                cause="state",
            )

    def _note_generator(self, generator: torch.Generator | None) -> None:
        """Refuse to draw from a generator that the forward makes: a plan would draw on from it.

        The tracer runs a forward twice: one that was there before is met again.
        """
        if generator is None:
            return
        if self._runs > 1 and all(generator is not other for other in self._generators_before):
            raise CaptureError(
                f"module {self._trail.running!r} draws from a generator that its forward makes: "
                "a planned step would draw on from it, not from its seed. Way out: draw once and "
                "keep it as a buffer, or make the generator outside of the fitted module",
                module=self._trail.running,
                cause="state",
            )
        self._generators.append(generator)

    def _refuse_writing_outside(self, func: Any, args: tuple[Any, ...]) -> None:
        """Refuse to write into a tensor that has values: it would happen while tracing."""
        if may_write(func) and args and has_values(args[0]):
            raise CaptureError(
                f"module {self._trail.running!r} writes ({func}) into a tensor of shape "
                f"{list(args[0].shape)} that is neither a parameter, a buffer nor an input. Way "
                "out: self.register_buffer(name, tensor, persistent=False)",
                cause="outside",
            )

    def decisions(self) -> Decisions:
        """Return what was read since the last start."""
        return self._tape.decisions()

    def known_value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return what a traced tensor is, if it follows from inputs and buffers alone."""
        slot = self._tape.slot(tensor)
        history = self._tape.history({slot})
        return None if history is None else self._tape.replay(itself(slot), history)

    def values_of(self, tensor: torch.Tensor) -> list[int]:
        """Return the values of a traced tensor of integers; later calls check them.

        Raises
        ------
        CaptureError
            If they do not follow from inputs and buffers alone.
        """
        slot = self._tape.slot(tensor)
        history = self._tape.history({slot})
        if history is None:
            raise CaptureError(
                f"{tensor.numel()} lengths of packed sequences depend on values that are computed "
                "here. Way out: move packing, recurrent module and unpacking into one module and "
                "mark it with tightfit.opaque",
                module=self._trail.running,
            )
        values = self._tape.replay(itself(slot), history).tolist()
        self._tape.check_numbers(slot, history, values, self._trail.running)
        return values

    def _ask(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Answer for an operator that tells Python something about values."""
        step = self._tape.step_of(func, args, kwargs, None)
        told = self._next_answer(func, args)
        selected = selected_from(func, args)
        asked = set(map(self._tape.slot, selected[1]) if selected else step.slots())
        history = self._tape.history(asked)
        if history is None and (told is None or self._trail.running not in self._answered):
            if func is aten._local_scalar_dense.default and self._tape.is_drawn(asked):
                refuse_drawn(self._trail.running)
            return func(*args, **kwargs)  # fails: it is unknown, or an inner module's business
        if func is aten._local_scalar_dense.default and self._numbers is not None:
            value = self._tape.replay(step, history) if history is not None else told.value
            number = self._numbers.take(args[0], lambda: func(*args, **kwargs), value)
            if number is not None:
                return number
        if history is None:
            assert told is not None
            answer = told
        elif selected:
            answer = self._selected(step, *selected)
        else:
            answer = self._learned(step, history)
        if history is not None and not isinstance(answer.value, tuple):
            return answer.value
        result = self._put(func, args, kwargs, answer, known=history is not None and not selected)
        if history is not None and func is aten._pack_padded_sequence.default:
            self._note_batch_sizes(args, result[1])
        return result

    def _note_batch_sizes(self, args: tuple[Any, ...], sizes: torch.Tensor) -> None:
        """Note that batch sizes follow from lengths alone, not from what is packed."""
        narrow = self._tape.new_slot()
        shape = [*args[0].shape[:2], 1]
        self._tape.append(TapeStep(aten.zeros.default, (shape,), {}, (narrow,)))
        given = (TapeSlot(narrow), TapeSlot(self._tape.slot(args[1])), *args[2:])
        outputs = (None, self._tape.slot(sizes))
        self._tape.append(TapeStep(aten._pack_padded_sequence.default, given, {}, outputs))

    def _put(
        self, func: Any, args: tuple[Any, ...], kwargs: Any, answer: Answer, *, known: bool
    ) -> Any:
        """Put a question into the trace, for every step to check its answer."""
        leaves, spec = flatten((args, kwargs))
        running, last = self._trail.running, self._trail.last
        question = Question(func, leaves, spec, answer, running, last)
        self.questions.append(question)
        results = question.asked([x for x in leaves if isinstance(x, torch.Tensor)])
        if not isinstance(answer.value, tuple):
            return answer.value
        result = results[0] if len(results) == 1 else tuple(results)
        if known:
            self._tape.note(func, args, kwargs, result)
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

    def _learned(self, step: TapeStep, history: set[int]) -> Answer:
        """Run the steps that a question follows from on the real inputs; return the answer."""
        answer = answer_of(step.function, self._tape.replay(step, history))
        self._tape.check(step, history, answer, self._trail.running)
        return answer

    def _selected(self, step: TapeStep, x: Any, masks: list[Any]) -> Answer:
        """Return how large a selection by masks is, which no value but theirs decides."""
        tape = self._tape
        known: dict[int, Any] = {}
        for mask in masks:
            slot = tape.slot(mask)
            history = tape.history({slot})
            assert history is not None
            known[slot] = tape.replay(itself(slot), history)
            total = tape.new_slot()
            count = tape.append(TapeStep(aten.sum.default, (TapeSlot(slot),), {}, (total,)))
            scalar = aten._local_scalar_dense.default
            self._learned(TapeStep(scalar, (TapeSlot(total),), {}, (None,)), {*history, count})
        with private.without_modes(), torch.no_grad():
            known[tape.slot(x)] = Geometry.of(x).empty()
            rest = {n: torch.zeros((), dtype=torch.long) for n in step.slots() if n not in known}
            return answer_of(step.function, step.result(known | rest))


class GraphRecorder(DecisionRecorder):
    """Follows a graph: between its operators there is no Python. See `DecisionRecorder`."""

    def refuse_seeding(self) -> None:
        """Refuse a graph that has seeded a generator, or drawn from Python's, by its end."""
        super().refuse_seeding()
        self._refuse_python_draws()

    def _after_python(self) -> None:
        pass


def _seeded() -> bytes:
    """Return the state of PyTorch's generator."""
    with private.without_modes():
        return torch.get_rng_state().numpy().tobytes()
