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
class _Holder:
    """What has a budget, its own or a shared budget, and what runs when it is gone."""

    shared: Budget | None
    size_bytes: int
    death: weakref.finalize[Any, Any]


class Metered:
    """Counts bytes given out while something is fitted, and bytes of fitted modules before it.

    Other memory that the program held before, such as its data, is no part of a budget. Freeing it
    makes no room in the budget either. Memory of fitted modules counts until it is freed: weights
    may be replaced by averaged ones. Where all that was fitted is gone, no budget is in force: the
    next `fit` starts the count again, as its own limit does.
    """

    def __init__(self) -> None:
        installed_hook()  # counts from now on, before the program makes anything
        self._meter: Meter | None = None
        self._tally: Tally | None = None
        self._of_limit: tuple[torch.device, Tally | None] | None = None
        self._base_bytes = 0
        self._before: dict[StorageWeakRef, int] = {}  # bytes of modules before `fit`
        self._most_bytes = 0  # of these and of all that was given out since
        self._earlier_bytes: int | None = None  # the most under budgets that are over
        self._counts_all = False
        self._counted: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._budgets: dict[int, _Holder] = {}  # by the identity of what has a budget
        self._largest_budget_bytes = 0
        self._asks_device = False

    @property
    def budget_bytes(self) -> int | None:
        """The largest sum of all budgets; None where a budget is the free memory of a device."""
        return None if self._asks_device else self._largest_budget_bytes or None

    def count_from_now(self, device: torch.device) -> None:
        """Count what is given out from now on, unless something is fitted already."""
        if self._budgets or self._asks_device:
            return
        self.count_from_fit()
        everything = alive([torch.Tensor, nn.Parameter])
        self._start(device, everything)
        self._of_limit = device, tally_for(device, everything)

    def count_from_fit(self) -> None:
        """Begin to count with what is fitted next."""
        self._meter = self._tally = self._of_limit = None

    def tally_on(self, device: torch.device) -> Tally | None:
        """Return what counts for the limit of what is fitted next; None: nothing does yet."""
        known = self._of_limit
        return known[1] if known is not None and known[0] == device else None

    def look(self) -> None:
        """See which memory of before is freed: what is held from now on excludes it."""
        self._take_own()

    def take_peak_bytes(self) -> int | None:
        """Return the most that was held while something was fitted; None before that."""
        known = [each for each in (self._earlier_bytes, self._take_own()) if each is not None]
        return max(known, default=None)

    def _forget_peak(self) -> None:
        if self._meter is not None:
            self._meter.reset_peak()
        if isinstance(self._tally, CpuTally):
            self._tally.take_peak_bytes()
        self._most_bytes = 0

    def _take_own(self) -> int | None:
        """Return the most under the budgets that are in force."""
        if self._meter is None:
            return None
        if not isinstance(self._tally, CpuTally) or self._counts_all:
            return self._meter.peak_bytes() - self._base_bytes
        held_bytes = sum(self._before.values()) + self._tally.take_peak_bytes()
        self._most_bytes = max(self._most_bytes, held_bytes)
        self._before = {s: size for s, size in self._before.items() if not s.expired()}
        return self._most_bytes

    def begin(
        self, modules: Sequence[nn.Module], optimizer: Any, budget: int | str | Budget
    ) -> None:
        """Count these modules, too: they are fitted now.

        `optimizer`: of their parameters, if it is known. `budget`: as `tightfit.fit` takes it.
        """
        new = {str(n): module for n, module in enumerate(modules) if module not in self._counted}
        self._counted.update(new.values())
        device = device_of_modules({str(n): module for n, module in enumerate(modules)})
        own = _held_by(new, optimizer, device)
        if not self._budgets and not self._asks_device:
            self._forget_peak()  # from before anything was fitted
        self.look()
        self._start(device, own)
        tally = self._tally
        before = [t for t in own if tally is None or not tally.counted_bytes([t])]
        granularity = granularity_of(device.type)
        self._base_bytes -= resident_tensor_bytes(before, granularity)
        for storage in storages_of(before):
            self._before[StorageWeakRef(storage)] = rounded_up(storage.nbytes(), granularity)
        self._note(modules, budget)

    def begin_with_all(self, budget_bytes: int) -> None:
        """Count all that is held, by whomever: a budget is for all of it."""
        self._start(torch.device("cpu"), [])
        self._base_bytes, self._counts_all = 0, True
        self._note([], Budget(budget_bytes))

    def end(self, holder: nn.Module) -> None:
        self._over(id(holder))

    def _over(self, holder: int) -> None:
        """Stop counting if no other object has a budget than this one."""
        if not self._forget(holder):
            return
        if not self._budgets and not self._asks_device:
            self._earlier_bytes = self.take_peak_bytes()
            self.count_from_fit()
            self._most_bytes = 0
            self._before.clear()
            self._counted.clear()

    def _forget(self, holder: int) -> bool:
        """Drop the budget of an object; return whether it had any."""
        known = self._budgets.pop(holder, None)
        if known is not None:
            known.death.detach()
        return known is not None

    def _start(self, device: torch.device, own: list[torch.Tensor]) -> None:
        if self._meter is None:
            self._meter, self._tally = meter_for(device), tally_for(device, own)
            self._meter.reset_peak()
            self._base_bytes = self._meter.live_bytes()

    def _note(self, modules: Sequence[nn.Module], budget: int | str | Budget) -> None:
        """Note objects that have a budget, for as long as they live or until they are unfitted."""
        if budget == "device":
            self._asks_device = True
            return
        shared = budget if isinstance(budget, Budget) else None
        size_bytes = budget.size_bytes if isinstance(budget, Budget) else parse_bytes(budget)
        for module in modules:
            self._forget(id(module))
        holders = modules if shared is not None else modules[:1]
        for holder in holders or [self]:
            death = weakref.finalize(holder, self._over, id(holder))
            death.atexit = False
            self._budgets[id(holder)] = _Holder(shared, size_bytes, death)
        sizes = {id(known.shared or known): known.size_bytes for known in self._budgets.values()}
        self._largest_budget_bytes = max(self._largest_budget_bytes, sum(sizes.values()))


def _held_by(
    modules: Mapping[str, nn.Module], optimizer: Any, device: torch.device
) -> list[torch.Tensor]:
    """Return parameters, buffers, gradients and the state of optimizers, as far as they exist."""
    optimizers = Optimizers(modules, optimizer, granularity_of(device.type))
    optimizers.look()
    parameters = [p for m in modules.values() for p in m.parameters()]
    held = [*parameters, *(b for m in modules.values() for b in m.buffers())]
    held += [p.grad for p in parameters if p.grad is not None]
    return held + [t for t in optimizers.tensors() if t.device.type == device.type]
