"""Steps at planned addresses on a GPU. Never run on one: see docs/arena.md."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable
from typing import Any

import msgspec
import torch

from tightfit.allocator import meter_for
from tightfit.allocator.cuda_ground import CudaGround
from tightfit.arenas.steering import Ground, Steered, Steering, why_not_led
from tightfit.errors import BadInput, InfeasibleBudget
from tightfit.execution.placing import placed_runner
from tightfit.execution.runtime import Runner
from tightfit.graph.ir import Graph
from tightfit.layout.holes import Script, script_of_plan
from tightfit.plan.plan import Plan
from tightfit.progress import announce
from tightfit.session.anywhere import Anywhere, PlannedStep
from tightfit.session.memory.account import Account
from tightfit.session.options import Options
from tightfit.session.report import Held, Report
from tightfit.torch_private.gpu.allocator_settings import divide_coarsely
from tightfit.units import format_bytes

__all__ = ["DeviceAddresses"]

_MOST_PLANS = 32
"""Whose programs are kept."""

_MOST_ROUNDS = 4
"""Of planning with more left of the budget."""


class DeviceAddresses(Anywhere):
    """The arena of a fitted callable on a GPU.

    The places follow from the plan. Its program is written with a word before each op that
    requests much. Fillers, which are ordinary tensors, then leave nothing free in the arena but the
    places of that op, so that PyTorch's own allocator gives out these. What plans leave of the
    budget is what the layout is higher than they say.

    Parameters
    ----------
    name : str
        Of the callable, for messages.
    account : Account
        What tensors hold around its steps.
    options : Options
        What the user asked for.
    ground_for : callable, optional
        Returns the memory of an arena that is so many bytes high.

    Raises
    ------
    BadInput
        If the device or its allocator cannot be led to addresses, or if plans are to be compiled.
    """

    def __init__(
        self,
        name: str,
        account: Account,
        options: Options,
        ground_for: Callable[[int], Ground] | None = None,
    ) -> None:
        device = account.device
        if ground_for is None:
            reason = _why_not_led(device) if device.type == "cuda" else "it is no CUDA device"
            if reason is not None:
                raise BadInput(
                    f"arena=True is not available for {name}, which lies on {device}: {reason}. "
                    "Leave it out"
                )
        if options.compile:
            raise BadInput(
                f"arena=True with compile=True is available on the CPU only, and {name} lies on "
                f"{device}: a compiled plan requests memory in an order of its own"
            )
        self._name = name
        self._account = account
        self._steering = Steering(ground_for or functools.partial(CudaGround, device=device))
        self._runners: dict[tuple[int, bool], Runner] = {}
        self._held_bytes = 0  # by the last plan, laid out
        self._peak_bytes = 0  # as it says itself
        self._left_bytes = 0
        self._rounds = 0
        self._looked = False
        self._gave_way = False
        self._height_bytes = 0

    # -- steps --------------------------------------------------------------------------------

    def runner_for(self, number: int, graph: Graph, plan: Plan, runner: Runner) -> Runner:
        """Return what runs a plan at its places."""
        key = number, self._with_gradients
        if key not in self._runners:
            if len(self._runners) == _MOST_PLANS:
                del self._runners[next(iter(self._runners))]
            script = self._note(graph, plan)
            places = _Places(self._steering, script)
            self._runners[key] = placed_runner(runner, plan, places, places.instructions)
        return self._runners[key]

    def heed(self, planned: PlannedStep | None) -> None:
        """Note what the plan that is to run holds, laid out."""
        if planned is not None and planned.outcome.plan is not None:
            self._note(planned.graph, planned.outcome.plan)

    def note_parts(self) -> None:
        """Say that a step is not placed."""
        announce(
            f"{self._name} is planned part by part, and arena=True places steps on a GPU that are "
            "planned as a whole: this one lies where PyTorch's allocator puts it"
        )

    def leave(self) -> None:
        """Give the arena back, once nothing in it is alive."""
        self._runners.clear()
        self._steering.leave()

    @property
    def _with_gradients(self) -> bool:
        """Whether gradients are gone when the next step begins, as far as has been seen."""
        return not self._steering.outlived

    def _note(self, graph: Graph, plan: Plan) -> Script:
        script = script_of_plan(graph, plan, with_gradients=self._with_gradients)
        self._height_bytes = script.height_bytes
        self._held_bytes = graph.constant_bytes + script.height_bytes + script.outside_bytes
        self._peak_bytes = graph.constant_bytes + script.peak_bytes
        return script

    # -- what is held -------------------------------------------------------------------------

    def awaits_a_plan(self, options: Options) -> bool:
        """Whether no plan was looked at yet."""
        return not self._looked and options.is_alone

    def look(self, inputs: Iterable[Any], options: Options) -> Options:
        """Leave of the budget what the last plan holds more, laid out, than there is."""
        if not self._held_bytes or not options.is_alone:
            return options
        self._looked = True
        over_bytes = self._held_bytes - options.usable_bytes
        if over_bytes <= 0 or self._gave_way or self._rounds == _MOST_ROUNDS:
            return options
        self._rounds += 1
        planned_bytes = min(options.planned_bytes, self._peak_bytes)
        self._left_bytes = options.usable_bytes - (planned_bytes - over_bytes)
        return dataclasses.replace(options, left_bytes=self._left_bytes)

    def giving_way(self, options: Options, error: InfeasibleBudget) -> Options:
        """Leave nothing where no plan leaves so much; say by how much the budget is exceeded."""
        if not self._left_bytes:
            raise error
        announce(
            f"{self._name}: laid out, plans take up to {format_bytes(self._left_bytes)} more than "
            f"the budget. {str(error).splitlines()[0]}"
        )
        self._left_bytes, self._gave_way = 0, True
        return dataclasses.replace(options, left_bytes=0)

    def added_to(self, report: Report) -> Report:
        """Return a report with what happened in the arena, and what the device's allocator held."""
        reserved_bytes = meter_for(self._account.device).held_bytes()
        tensor_bytes = self._account.lasting_bytes()
        held = Held(
            height_bytes=self._height_bytes,
            tensor_bytes=tensor_bytes,
            rest_bytes=max(0, reserved_bytes - self._height_bytes - tensor_bytes),
            file_bytes=0,
        )
        return msgspec.structs.replace(
            report, arena=self._steering.report, held=held, reserved_bytes=reserved_bytes
        )


class _Places:
    """Where the steps of one plan lie."""

    def __init__(self, steering: Steering, script: Script) -> None:
        self._steering = steering
        self._script = script

    @property
    def instructions(self) -> Collection[int]:
        """Before which a step says what comes."""
        return self._script.turns.keys()

    def begin(self) -> Steered:
        """Begin a step."""
        return self._steering.begin(self._script)

    def end(self, step: Steered) -> None:
        """End a step."""
        self._steering.end(step)


@functools.cache
def _why_not_led(device: torch.device) -> str | None:
    """Return why requests cannot be led on a GPU; None if they can, as they do from now on."""
    backend = torch.cuda.get_allocator_backend()
    if backend != "native":
        return f"the allocator in use is {backend}, which cannot be led to addresses"
    divide_coarsely()
    return why_not_led(functools.partial(CudaGround, device=device))
