"""The bytes that a program holds from `fit` on, counted as its budget counts them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tightfit.allocator import Meter, meter_for
from tightfit.allocator.alive import alive
from tightfit.allocator.hook import installed_hook
from tightfit.allocator.resident import granularity_of, resident_tensor_bytes, storages_of
from tightfit.allocator.tally import CpuTally, Tally, tally_for
from tightfit.session.memory.budget import Budget
from tightfit.session.memory.devices import device_of_modules
from tightfit.session.memory.optimizers import Optimizers
from tightfit.units import parse_bytes, rounded_up


@dataclass(frozen=True)
class _BudgetInForce:
    """The budget of a module: its own, or a shared one."""

    shared: Budget | None
    size_bytes: int
    finalizer: weakref.finalize[Any, Any]


class ProgramMemory:
    """Counts bytes allocated while something is fitted, and memory that fitted modules had before.

    Other memory from before, such as data sets, is no part of a budget, and freeing it makes no
    room there. Memory of fitted modules counts until it is freed: weights may be replaced by
    averaged ones. Once all fitted modules are gone, no budget is in force: the next `fit` starts
    the count again, as the limit of `fit` does.
    """

    def __init__(self) -> None:
        installed_hook()  # counts from now on, before the program makes anything
        self._meter: Meter | None = None
        self._tally: Tally | None = None
        self._tally_of_limit: tuple[torch.device, Tally | None] | None = None
        self._base_bytes = 0  # live bytes that do not count
        self._before: dict[StorageWeakRef, int] = {}  # bytes of fitted modules, from before `fit`
        self._peak_bytes = 0  # of these and of all that was allocated since
        self._earlier_peak_bytes: int | None = None  # under budgets that are no longer in force
        self._counts_all = False
        self._counted: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._budgets: dict[int, _BudgetInForce] = {}  # by the id of the module that has it
        self._largest_budget_bytes = 0
        self._budget_is_device = False

    @property
    def budget_bytes(self) -> int | None:
        """The largest sum of all budgets; None where a budget is the free memory of a device."""
        return None if self._budget_is_device else self._largest_budget_bytes or None

    @property
    def _has_budget(self) -> bool:
        return bool(self._budgets) or self._budget_is_device

    def count_from_now(self, device: torch.device) -> None:
        """Count allocations from now on, unless something is fitted already."""
        if self._has_budget:
            return
        self.count_from_fit()
        everything = alive([torch.Tensor, nn.Parameter])
        self._start(device, everything)
        self._tally_of_limit = device, tally_for(device, everything)

    def count_from_fit(self) -> None:
        """Begin to count at the next `fit`."""
        self._meter = self._tally = self._tally_of_limit = None

    def tally_on(self, device: torch.device) -> Tally | None:
        """Return the tally for the limit of the next `fit`, if it has begun to count."""
        known = self._tally_of_limit
        return known[1] if known is not None and known[0] == device else None

    def drop_freed(self) -> None:
        """Exclude memory from before `fit` that is freed by now from later peaks."""
        self._current_peak_bytes()

    def take_peak_bytes(self) -> int | None:
        """Return the most that was held while something was fitted; None before that."""
        peaks = (self._earlier_peak_bytes, self._current_peak_bytes())
        return max((peak for peak in peaks if peak is not None), default=None)

    def _reset_peak(self) -> None:
        if self._meter is not None:
            self._meter.reset_peak()
        if isinstance(self._tally, CpuTally):
            self._tally.take_peak_bytes()
        self._peak_bytes = 0

    def _current_peak_bytes(self) -> int | None:
        """Return the peak under the budgets in force; drop memory that is freed by now."""
        if self._meter is None:
            return None
        if not isinstance(self._tally, CpuTally) or self._counts_all:
            return self._meter.peak_bytes() - self._base_bytes
        held_bytes = sum(self._before.values()) + self._tally.take_peak_bytes()
        self._peak_bytes = max(self._peak_bytes, held_bytes)
        self._before = {s: size for s, size in self._before.items() if not s.expired()}
        return self._peak_bytes

    def begin(
        self, modules: Sequence[nn.Module], optimizer: Any, budget: int | str | Budget
    ) -> None:
        """Count modules that are fitted now, with their optimizer if it is known."""
        new = {str(n): module for n, module in enumerate(modules) if module not in self._counted}
        self._counted.update(new.values())
        device = device_of_modules({str(n): module for n, module in enumerate(modules)})
        own = _tensors_of(new, optimizer, device)
        if not self._has_budget:
            self._reset_peak()  # from before anything was fitted
        self.drop_freed()
        self._start(device, own)
        tally = self._tally
        before = [t for t in own if tally is None or not tally.counted_bytes([t])]
        granularity = granularity_of(device.type)
        self._base_bytes -= resident_tensor_bytes(before, granularity)
        for storage in storages_of(before):
            self._before[StorageWeakRef(storage)] = rounded_up(storage.nbytes(), granularity)
        self._add_budget(modules, budget)

    def begin_with_all(self, budget_bytes: int) -> None:
        """Count all memory of the process."""
        self._start(torch.device("cpu"), [])
        self._base_bytes, self._counts_all = 0, True
        self._add_budget([], Budget(budget_bytes))

    def end(self, module: nn.Module) -> None:
        """Drop the budget of a module; stop counting with the last budget."""
        self._end(id(module))

    def _end(self, module_id: int) -> None:
        if self._drop_budget(module_id) and not self._has_budget:
            self._earlier_peak_bytes = self.take_peak_bytes()
            self.count_from_fit()
            self._peak_bytes = 0
            self._before.clear()
            self._counted.clear()

    def _drop_budget(self, module_id: int) -> bool:
        """Drop the budget of a module; return whether it had any."""
        known = self._budgets.pop(module_id, None)
        if known is not None:
            known.finalizer.detach()
        return known is not None

    def _start(self, device: torch.device, own: list[torch.Tensor]) -> None:
        if self._meter is None:
            self._meter, self._tally = meter_for(device), tally_for(device, own)
            self._meter.reset_peak()
            self._base_bytes = self._meter.live_bytes()

    def _add_budget(self, modules: Sequence[nn.Module], budget: int | str | Budget) -> None:
        """Add a budget that is in force until its modules are unfitted or collected."""
        if budget == "device":
            self._budget_is_device = True
            return
        shared = budget if isinstance(budget, Budget) else None
        size_bytes = budget.size_bytes if isinstance(budget, Budget) else parse_bytes(budget)
        for module in modules:
            self._drop_budget(id(module))
        holders = modules if shared is not None else modules[:1]
        for holder in holders or [self]:
            finalizer = weakref.finalize(holder, self._end, id(holder))
            finalizer.atexit = False
            self._budgets[id(holder)] = _BudgetInForce(shared, size_bytes, finalizer)
        sizes = {id(known.shared or known): known.size_bytes for known in self._budgets.values()}
        self._largest_budget_bytes = max(self._largest_budget_bytes, sum(sizes.values()))


def _tensors_of(
    modules: Mapping[str, nn.Module], optimizer: Any, device: torch.device
) -> list[torch.Tensor]:
    """Return the parameters, buffers, gradients and optimizer state that exist."""
    optimizers = Optimizers(modules, optimizer, granularity_of(device.type))
    optimizers.find()
    parameters = [p for m in modules.values() for p in m.parameters()]
    held = [*parameters, *(b for m in modules.values() for b in m.buffers())]
    held += [p.grad for p in parameters if p.grad is not None]
    return held + [t for t in optimizers.tensors() if t.device.type == device.type]
