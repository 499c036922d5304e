"""Steps at planned addresses on a GPU."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable

import msgspec
import torch

from tightfit.allocator import meter_for
from tightfit.allocator.cuda_arena_memory import CudaArenaMemory
from tightfit.arenas.fillers import FilledStep, FillerPlacement, placing_obstacle
from tightfit.errors import BadInput, InfeasibleBudget
from tightfit.execution.placing import placed_runner
from tightfit.execution.runtime import Runner
from tightfit.graph.ir import Graph
from tightfit.layout.holes import Script, script_of_plan
from tightfit.plan.plan import Compute, Plan
from tightfit.progress import announce
from tightfit.session.default_addresses import DefaultAddresses
from tightfit.session.memory.account import Account
from tightfit.session.options import Options
from tightfit.session.report import Held, Report
from tightfit.session.step.graphs_of_step import Planned
from tightfit.torch_private.gpu.allocator_settings import divide_coarsely, segments_expand
from tightfit.units import format_bytes

_MOST_PLANS = 32  # whose programs are kept
_MOST_ROUNDS = 4  # of planning with more left of the budget


class DeviceAddresses(DefaultAddresses):
    """The arena of a fitted callable on a GPU.

    The addresses follow from the plan. Before each op with large requests, fillers occupy all of
    the arena but the addresses of that op, so that PyTorch's own allocator returns these. Fillers
    are ordinary tensors. Plans leave as much of the budget as the layout is higher than their peak.

    `memory_for`: returns the memory of an arena of so many bytes. Raises `BadInput` if the
    allocator of the device cannot place requests so, or if plans are to be compiled.
    """

    def __init__(
        self,
        name: str,
        account: Account,
        options: Options,
        memory_for: Callable[[int], CudaArenaMemory] | None = None,
    ) -> None:
        device = account.device
        if memory_for is None:
            reason = _placing_obstacle(device) if device.type == "cuda" else "it is no CUDA device"
            if reason is not None:
                raise BadInput(
                    f"arena=True is not available for {name}, which is on {device}: {reason}. "
                    "Leave it out"
                )
        if options.compile:
            raise BadInput(
                f"arena=True with compile=True is available on the CPU only, and {name} is on "
                f"{device}: a compiled plan requests memory in an order of its own"
            )
        self._name = name
        self._account = account
        self._fillers = FillerPlacement(
            memory_for or functools.partial(CudaArenaMemory, device=device)
        )
        self._laid_out: dict[tuple[int, bool], _LaidOut] = {}
        self._left_bytes = 0
        self._rounds = 0
        self._leaves_less = self._is_announced = False
        self._height_bytes = 0

    # -- steps --------------------------------------------------------------------------------

    def accept(self, planned: Planned, options: Options) -> Options:
        """Leave as much of the budget as the layout of a plan exceeds it."""
        assert planned.outcome.plan is not None
        laid_out = self._of(planned.number, planned.graph, planned.outcome.plan)
        room_bytes = (
            options.usable_bytes - planned.graph.constant_bytes - laid_out.script.outside_bytes
        )
        over_bytes = laid_out.script.height_bytes - room_bytes
        laid_out.set_placed(over_bytes <= 0 or not options.is_alone)
        if laid_out.is_placed:
            self._rounds = 0
            if self._fillers.height_bytes > max(room_bytes, laid_out.script.height_bytes):
                self._fillers.leave()  # its arena is that of a higher plan
            return options
        if self._leaves_less or self._rounds == _MOST_ROUNDS:
            self._announce_excess(over_bytes)
            return options
        self._rounds += 1
        peak_bytes = planned.graph.constant_bytes + laid_out.script.peak_bytes
        planned_bytes = min(options.planned_bytes, peak_bytes)
        self._left_bytes = options.usable_bytes - (planned_bytes - over_bytes)
        return dataclasses.replace(options, left_bytes=self._left_bytes)

    def runner_for(self, number: int, graph: Graph, plan: Plan, runner: Runner) -> Runner:
        laid_out = self._of(number, graph, plan)
        if not laid_out.is_placed:
            return runner
        self._height_bytes = laid_out.script.height_bytes
        return laid_out.runner(runner, plan)

    def _of(self, number: int, graph: Graph, plan: Plan) -> _LaidOut:
        """Return the layout of a plan, made again if some requests had no room at theirs."""
        with_gradients = not self._fillers.outlived  # gone when the next step begins, it seems
        key = number, with_gradients
        known = self._laid_out.get(key)
        if known is not None and not known.crowded:
            return known
        elsewhere = frozenset[int]()
        if known is not None:
            elsewhere = known.elsewhere | _of_one_kind(graph, plan, known.crowded)
        script = script_of_plan(graph, plan, with_gradients=with_gradients, elsewhere=elsewhere)
        if known is None and len(self._laid_out) == _MOST_PLANS:
            del self._laid_out[next(iter(self._laid_out))]
        self._laid_out[key] = _LaidOut(self._fillers, script, elsewhere)
        return self._laid_out[key]

    def note_parts(self) -> None:
        announce(
            f"{self._name} is planned part by part, and arena=True places steps on a GPU that are "
            "planned as a whole: PyTorch's allocator places this step"
        )

    def leave(self) -> None:
        self._laid_out.clear()
        self._fillers.leave()

    # -- memory held --------------------------------------------------------------------------

    def leaving_less(self, options: Options, error: InfeasibleBudget) -> Options:
        """Leave nothing: the allocator places the steps."""
        if not self._left_bytes:
            raise error
        self._left_bytes, self._leaves_less = 0, True
        return dataclasses.replace(options, left_bytes=0)

    def _announce_excess(self, over_bytes: int) -> None:
        if self._is_announced:
            return
        self._is_announced = True
        announce(
            f"{self._name}: at planned addresses a step takes {format_bytes(over_bytes)} more than "
            "the budget, and no plan was found that leaves as much: PyTorch's "
            "allocator places it"
        )

    def added_to(self, report: Report) -> Report:
        reserved_bytes = meter_for(self._account.device).held_bytes()
        tensor_bytes = self._account.lasting_bytes()
        held = Held(
            height_bytes=self._height_bytes,
            tensor_bytes=tensor_bytes,
            rest_bytes=max(0, reserved_bytes - self._height_bytes - tensor_bytes),
            file_bytes=0,
        )
        return msgspec.structs.replace(
            report, arena=self._fillers.report, held=held, reserved_bytes=reserved_bytes
        )


class _LaidOut:
    """The addresses of the blocks of a plan.

    `elsewhere`: instructions whose requests the allocator places: they had no room. `crowded`:
    further instructions that had none in the last step. `is_placed`: whether steps use the
    addresses; if not, the allocator places them.
    """

    def __init__(self, fillers: FillerPlacement, script: Script, elsewhere: frozenset[int]) -> None:
        self.script = script
        self.elsewhere = elsewhere
        self.crowded = frozenset[int]()
        self.is_placed = True
        self._fillers = fillers
        self._runner: Runner | None = None
        self._is_known = False

    def set_placed(self, fits: bool) -> None:
        self.is_placed = fits

    def runner(self, anywhere: Runner, plan: Plan) -> Runner:
        if self._runner is None:
            self._runner = placed_runner(anywhere, plan, self, self.script.turns.keys())
        return self._runner

    def begin(self) -> FilledStep:
        return self._fillers.begin(self.script, notes_growth=not self._is_known)

    def end(self, step: FilledStep) -> None:
        self._fillers.end(step)
        self.crowded = frozenset(step.crowded)
        self._is_known = self._is_known or step.is_exact


def _of_one_kind(graph: Graph, plan: Plan, instructions: Iterable[int]) -> frozenset[int]:
    """Return the instructions of a plan that run the operators that some of them run."""
    ops = {n: graph.ops[i.op] for n, i in enumerate(plan.instructions) if isinstance(i, Compute)}
    kinds = {ops[n].target for n in instructions}
    return frozenset(n for n, op in ops.items() if op.target in kinds)


@functools.cache
def _placing_obstacle(device: torch.device) -> str | None:
    """Return why requests cannot be placed on a GPU; else prepare its allocator, and None."""
    backend = torch.cuda.get_allocator_backend()
    if backend != "native":
        return f"the allocator in use is {backend}, which cannot be led to addresses"
    divide_coarsely()
    if segments_expand():
        return "its segments expand (expandable_segments:True), so that no block stays as it is"
    return placing_obstacle(functools.partial(CudaArenaMemory, device=device))
