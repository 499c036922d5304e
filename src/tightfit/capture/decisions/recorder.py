"""Follow the operators of a traced forward, and answer for the numbers it asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tightfit.capture.decisions.numbers import Numbers
from tightfit.capture.decisions.reads import Decisions, itself
from tightfit.capture.decisions.tape import Tape, has_values, may_write
from tightfit.capture.origins import ModuleTrail
from tightfit.errors import CaptureError
from tightfit.torch_private import core as private

aten = torch.ops.aten

_ASKING = frozenset({aten._local_scalar_dense.default, aten.equal.default})
"""Operators that tell Python a number."""


class DecisionRecorder(private.TorchDispatchMode):
    """Notes every operator of a traced forward, and answers for numbers that it reads.

    `inputs`: the flattened inputs, real tensors where values are to be known. `numbers`: takes
    numbers that are asked for as inputs of the step.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        inputs: Sequence[Any],
        modules: Mapping[str, nn.Module],
        trail: ModuleTrail,
        numbers: Numbers | None = None,
    ) -> None:
        super().__init__()
        self._inputs = inputs
        self._numbers = numbers
        self._trail = trail
        self._buffers = {
            f"{prefix}.{name}": buffer
            for prefix, module in modules.items()
            for name, buffer in module.named_buffers(remove_duplicate=False)
        }
        self.start((), {})

    def start(self, leaves: Sequence[Any], modules: Mapping[str, nn.Module]) -> None:
        """Start over: the tracer runs the forward several times.

        `leaves`: the tracer's stand-ins for the inputs. `modules`: the modules, with its stand-ins
        for their buffers.
        """
        self._tape = Tape()
        self._seeded = _seeded()
        if self._numbers is not None:
            self._numbers.start()
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
        if kwargs.get("generator") is not None:
            raise CaptureError(
                f"module {self._trail.running!r} draws from a torch.Generator of its own, which no "
                "plan can hold: draw in code that is not planned, or from PyTorch's own generator",
                module=self._trail.running,
            )
        if func in _ASKING:
            return self._ask(func, args, kwargs)
        self._tape.note(func, args, kwargs, result := func(*args, **kwargs))
        return result

    def refuse_seeding(self) -> None:
        """Refuse a forward that has seeded PyTorch's generator: a plan draws on from where it is.

        While a forward is traced nothing is drawn, so that the state is that of its start.

        Raises `CaptureError`: names the module that was running.
        """
        if self._seeded != _seeded():
            raise CaptureError(
                f"module {self._trail.running!r} seeds PyTorch's generator (torch.manual_seed, "
                "set_rng_state): a planned step continues from the generator's current state. Way "
                "out: seed it outside of the fitted module, or draw once and keep it as a buffer",
                module=self._trail.running,
            )

    def _refuse_writing_outside(self, func: Any, args: tuple[Any, ...]) -> None:
        """Refuse to write into a tensor that has values: it would happen while tracing."""
        if may_write(func) and args and has_values(args[0]):
            raise CaptureError(
                f"module {self._trail.running!r} writes ({func}) into a tensor of shape "
                f"{list(args[0].shape)} that is neither a parameter, a buffer nor an input. Way "
                "out: self.register_buffer(name, tensor, persistent=False)"
            )

    def decisions(self) -> Decisions:
        """Return values read since the last start."""
        return self._tape.decisions()

    def known_value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the value of a traced tensor, if it follows from inputs and buffers alone."""
        slot = self._tape.slot(tensor)
        history = self._tape.history({slot})
        return None if history is None else self._tape.replay(itself(slot), history)

    def _ask(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Answer for an operator that tells Python a number."""
        step = self._tape.step_of(func, args, kwargs, None)
        history = self._tape.history(set(step.slots()))
        if history is None:
            return func(*args, **kwargs)  # fails: it is unknown
        if func is aten._local_scalar_dense.default and self._numbers is not None:
            value = self._tape.replay(step, history)
            number = self._numbers.take(args[0], lambda: func(*args, **kwargs), value)
            if number is not None:
                return number
        value = self._tape.replay(step, history)
        self._tape.check(step, history, value)
        return value


def _seeded() -> bytes:
    with private.without_modes():
        return torch.get_rng_state().numpy().tobytes()
