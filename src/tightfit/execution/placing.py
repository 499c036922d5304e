"""Hooks around a program whose requests are led to their places."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator
from typing import Any, Protocol

import torch

from tightfit.execution.lower import Program, lower
from tightfit.execution.runtime import Runner
from tightfit.plan.plan import Plan


class PlacedStep(Protocol):
    """An object that a step tells its next instruction."""

    def turn(self, instruction: int, /) -> None:
        """Make ready for an instruction of the plan."""

    def pause(self) -> None:
        """Let requests be placed elsewhere: other code runs."""


class Places(Protocol):
    """The addresses of the steps of a plan."""

    def begin(self) -> PlacedStep:
        """Begin a step."""

    def end(self, step: PlacedStep, /) -> None:
        """End a step: its backward has ended, or failed."""


class Turns:
    """Hands the program's announcements on to the step that runs."""

    def __init__(self) -> None:
        self._step: PlacedStep | None = None

    def __call__(self, instruction: int) -> None:
        assert self._step is not None
        self._step.turn(instruction)

    def run(self, step: PlacedStep, function: Callable[[], Any]) -> Any:
        """Run a piece of a step; other steps run before and after it."""
        before, self._step = self._step, step
        try:
            return function()
        finally:
            self._step = before
            step.pause()


def placed_program(program: Program, turns: Turns, places: Places) -> Program:
    """Return a program that begins and ends its steps at their places.

    `program`: lowered with these turns. `turns`: called before instructions.
    """

    def forward(inputs: list[Any]) -> tuple[list[Any], list[Any]]:
        step = places.begin()
        try:
            raw, saved = turns.run(step, lambda: program.forward(inputs))
        except BaseException:
            places.end(step)
            raise
        saved.append(step)  # which lives as long as the call awaits its backward
        return raw, saved

    def backward(saved: list[Any], *given: Any) -> Iterator[list[torch.Tensor]]:
        step = saved.pop()
        pieces = program.backward(saved, *given)
        try:
            while (gradients := turns.run(step, lambda: next(pieces, None))) is not None:
                yield gradients
        finally:
            pieces.close()
            places.end(step)

    return dataclasses.replace(program, forward=forward, backward=backward)


def placed_runner(
    runner: Runner, plan: Plan, places: Places, instructions: Collection[int]
) -> Runner:
    """Return the runner of a plan at its addresses, with the actions before some instructions."""
    turns = Turns()
    program = lower(runner.captured, plan, turn=turns, turns=instructions)
    return Runner(runner.captured, placed_program(program, turns, places))
