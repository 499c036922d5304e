"""An arena on the CPU, and the bytes of the budget that are left to memory outside of it."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Hashable, Iterable
from typing import Any

import msgspec
import torch

from tightfit.allocator import anonymous_bytes, code_bytes
from tightfit.allocator.caching import CudaCachingAllocator
from tightfit.allocator.code_pages import drop_code_pages
from tightfit.allocator.replay import return_large_blocks_at_once, trim_ordinary_memory
from tightfit.arenas.calls import CallArena, Caller
from tightfit.errors import InfeasibleBudget
from tightfit.progress import announce
from tightfit.session.default_addresses import DefaultAddresses
from tightfit.session.memory.account import Account
from tightfit.session.memory.optimizers import before_every_step
from tightfit.session.on_gpu.addresses import DeviceAddresses
from tightfit.session.on_gpu.reserved import Reserved
from tightfit.session.options import Options
from tightfit.session.report import Held, Report
from tightfit.units import format_bytes

_SPARE = 1 / 64  # of the budget: left in addition, as memory of the process varies
_FIRST_BYTES = 14 << 20  # at most: memory that libraries prepare in the first step
_FIRST_SHARE = 1 / 16  # of the budget, where that is less
_MOST_ROUNDS = 4
_MOST_CALLS = 8  # between two steps of an optimizer that are distinguished


class Addresses(DefaultAddresses):
    """The arena of a fitted callable on the CPU.

    A plan bounds bytes allocated by PyTorch's allocator. The process also holds objects of Python
    and the planner, free pages of the C library, workspaces of libraries, and their code. That is
    measured between two steps, and so is by how much the arena is higher than the plan's peak. The
    next plans leave both of the budget.

    `left_bytes`: bytes of the budget that plans leave. Raises `HookUnavailable` if the CPU's
    allocator cannot be hooked.
    """

    def __init__(self, name: str, account: Account) -> None:
        self.left_bytes = 0
        self._spare_bytes = 0  # of it: more than was measured
        self._name = name
        self._account = account
        self._arena = CallArena()
        self._calls = 0  # since an optimizer has stepped
        before_every_step(self)
        return_large_blocks_at_once(True)  # also while the first step is captured and planned
        gc.collect()  # memory freed later would hide new memory
        trim_ordinary_memory()
        own_bytes = account.lasting_bytes()
        self._before_bytes = anonymous_bytes() - own_bytes
        self._files_before_bytes = code_bytes()
        self._measured_heights: set[int] = set()
        self._rounds = 0
        self._leaves_less = False  # no plan leaves as much as was asked for
        self._is_announced = False
        self._held: Held | None = None

    # -- steps --------------------------------------------------------------------------------

    def end_step(self) -> None:
        self._arena.end_step()

    def begin_step(self, shape: Hashable, caller: Caller) -> None:
        # calls whose gradients are added up differ: only after the last the optimizer steps
        self._calls = min(self._calls + 1, _MOST_CALLS)
        self._arena.begin_step((shape, self._calls), caller)

    def before_step(self, optimizer: Any) -> None:
        self._calls = 0

    def leave(self) -> None:
        self._arena.leave()
        return_large_blocks_at_once(False)

    # -- memory of the process ----------------------------------------------------------------

    def plans_first(self, options: Options) -> bool:
        return not self._measured_heights and self._may_measure(options)

    def measuring_bytes(self, options: Options) -> int:
        return 2 * min(_FIRST_BYTES, round(_FIRST_SHARE * options.usable_bytes))

    def measure(self, inputs: Iterable[Any], options: Options) -> Options:
        """Measure once when the first step was planned, and after an exact step of each layout.

        Plans leave nothing of a budget that others share, and a plan of the user's own leaves none.
        """
        height_bytes = self._arena.exact_height_bytes
        is_first = not self._measured_heights
        if height_bytes in self._measured_heights or not (height_bytes or is_first):
            return options
        if not self._may_measure(options):
            return options
        if is_first:
            gc.collect()  # garbage of capturing and planning
            drop_code_pages()
        trim_ordinary_memory()
        self._measured_heights.add(height_bytes)
        self._held = held = self._measured(inputs, height_bytes)
        budget_bytes = options.usable_bytes
        over_bytes = held.planned_bytes - (budget_bytes - self.left_bytes) if height_bytes else 0
        needed_bytes = held.rest_bytes + held.file_bytes + max(0, over_bytes)
        spare_bytes = round(_SPARE * budget_bytes)
        if self._leaves_less and needed_bytes > self.left_bytes:
            self._announce_excess(needed_bytes, "its plan is the least there is")
        is_close = needed_bytes <= self.left_bytes <= needed_bytes + 4 * spare_bytes
        if (is_close and not is_first) or self._leaves_less or self._rounds == _MOST_ROUNDS:
            return options
        self._rounds += 1
        if is_first:
            spare_bytes = min(_FIRST_BYTES, round(_FIRST_SHARE * budget_bytes))
        self._spare_bytes = spare_bytes
        self.left_bytes = needed_bytes + spare_bytes
        self._arena.drop_pages()  # while the next step is planned, too, the budget holds
        return self._changed(options)

    def _may_measure(self, options: Options) -> bool:
        """Whether new memory of the process can only be of this callable."""
        return options.is_alone and not self._arena.is_running and self._arena.is_alone

    def leaving_less(self, options: Options, error: InfeasibleBudget) -> Options:
        if not self.left_bytes:
            raise error
        needed_bytes = self.left_bytes - self._spare_bytes
        least_bytes = error.call_bytes
        lacking_bytes = 0 if least_bytes is None else least_bytes - options.limit_bytes
        is_known = 0 < lacking_bytes < self.left_bytes and not self._leaves_less
        self.left_bytes -= lacking_bytes if is_known else self.left_bytes
        self._leaves_less = True
        if self.left_bytes < needed_bytes:
            self._announce_excess(needed_bytes, str(error).splitlines()[0])
        return self._changed(options)

    def _announce_excess(self, needed_bytes: int, why: str) -> None:
        """Announce once that no plan leaves room for memory of the process other than tensors."""
        if self._is_announced:
            return
        self._is_announced = True
        announce(
            f"{self._name}: the process holds {format_bytes(needed_bytes)} in addition to tensors, "
            "and no plan leaves room for that: the process exceeds the budget by "
            f"{format_bytes(needed_bytes - self.left_bytes)}. {why}"
        )

    def _changed(self, options: Options) -> Options:
        return dataclasses.replace(options, left_bytes=self.left_bytes)

    def added_to(self, report: Report) -> Report:
        return msgspec.structs.replace(report, arena=self._arena.report, held=self._held)

    def _measured(self, inputs: Iterable[Any], height_bytes: int) -> Held:
        arena_bytes = self._arena.resident_bytes
        tensor_bytes = self._account.held_bytes() or self._account.resident_bytes(inputs)
        anonymous = anonymous_bytes() - self._before_bytes
        return Held(
            height_bytes=height_bytes,
            tensor_bytes=tensor_bytes,
            rest_bytes=max(0, anonymous - arena_bytes - tensor_bytes),
            file_bytes=max(0, code_bytes() - self._files_before_bytes),
        )


def addresses_for(name: str, account: Account, options: Options) -> DefaultAddresses:
    """Return where the steps of a callable are placed.

    Raises `BadInput` or `HookUnavailable` as `Addresses` and `DeviceAddresses` do.
    """
    device = account.device
    if not options.arena and device.type == "cuda" and torch.cuda.is_available():
        return Reserved(name, account, CudaCachingAllocator(device))
    if not options.arena:
        return DefaultAddresses()
    if device.type == "cpu":
        return Addresses(name, account)
    return DeviceAddresses(name, account, options)
