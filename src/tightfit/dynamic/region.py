"""A region of a program that keeps to a budget: its set-up and its end."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from typing import Any

import torch
from torch.optim import optimizer

from tightfit.allocator.refusals import budget_exceeded, is_refusal
from tightfit.dynamic.core import Core
from tightfit.dynamic.ledger import Ledger, OnlineReport
from tightfit.dynamic.native.compiling import BeingCompiled, CoreUnavailable, ForLaterReleases
from tightfit.dynamic.native.runtime import NativeRuntime
from tightfit.dynamic.pool import Candidates, Pool
from tightfit.dynamic.room import (
    Room,
    allocated_bytes,
    room_on,
    storages_alive,
)
from tightfit.dynamic.runtime import Runtime
from tightfit.errors import BadInput, BudgetExceeded, HookUnavailable, InfeasibleBudget
from tightfit.eviction.policies.policy import Policy
from tightfit.progress import announce
from tightfit.torch_private.storages import (
    intercepted_resizing,
    memory_obstacle,
    observed_addresses,
)
from tightfit.units import format_bytes, parse_bytes

_one_region_at_a_time = threading.Lock()


class Online:
    """A context in which plain PyTorch keeps to a budget; made by `tightfit.online`.

    Parameters
    ----------
    budget_bytes : int
        The limit.
    policy : Policy
        The eviction policy.
    candidates : Candidates
        Which contents an eviction looks at.
    most_again : float
        How often a step's own cost may be spent on computing again.
    device : torch.device
        Where.
    core : str
        ``"C++"``, which is waited for, ``"Python"``, or ``"auto"``: C++ where it is compiled
        already, else Python while it is compiled in the background.
    """

    def __init__(
        self,
        budget_bytes: int,
        policy: Policy,
        candidates: Candidates,
        *,
        most_again: float,
        device: torch.device,
        core: str,
    ) -> None:
        self._budget_bytes = budget_bytes
        self._policy = policy
        self._candidates = candidates
        self._ledger = Ledger(budget_bytes, most_again)
        self._device = device
        self._core = core
        self._seen_by = ""
        self._room: Room | None = None
        self._runtime: Core | None = None
        self._around = contextlib.ExitStack()
        self._peak_bytes = 0

    def __enter__(self) -> Online:
        reason = memory_obstacle()
        if reason:
            raise HookUnavailable(f"memory cannot be taken from tensors: {reason}")
        if not _one_region_at_a_time.acquire(blocking=False):
            raise BadInput("another region keeps to a budget already: regions cannot be nested")
        with contextlib.ExitStack() as around:
            around.callback(_one_region_at_a_time.release)
            self._set_up(around)
            self._around = around.pop_all()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        assert self._runtime is not None and self._room is not None
        runtime, room = self._runtime, self._room
        exceeded = None
        if error is not None and is_refusal(error):  # a limit that is gone says nothing
            message = "memory was requested outside PyTorch's operators, and all is evicted."
            if room.retries:
                message = "memory was requested outside PyTorch's operators, which evicts nothing"
                message += f" on {self._device.type!r}: call region.evict(...) before."
            exceeded = budget_exceeded(error, message)
        with self._around:
            runtime.end()
            runtime.clean_up_failed_backward()
            lost_bytes = 0 if kind else runtime.settle_all()
            runtime.update_ledger()
            self._peak_bytes = max(self._peak_bytes, room.peak_bytes())
        self._runtime = self._room = None
        if exceeded is not None:
            raise exceeded from error
        if lost_bytes:
            raise BudgetExceeded(
                f"the program still holds {format_bytes(lost_bytes)} of evicted tensors at the end "
                f"of the region, which have no room in the budget of "
                f"{format_bytes(self._budget_bytes)}. End the region where less is held, after the "
                "backward pass; their memory is gone",
                budget_bytes=self._budget_bytes,
                measured_bytes=self._budget_bytes + lost_bytes,
            )

    def evict(self, size: int | str) -> None:
        """Free memory now, before something that the region cannot see asks for it.

        Parameters
        ----------
        size : int or str
            Bytes, or text such as ``"1GiB"``; as much of it as may be evicted.

        Raises
        ------
        BadInput
            Outside the region.
        """
        if self._runtime is None:
            raise BadInput("memory can be freed inside the region only")
        self._runtime.make_room(parse_bytes(size, what="size"))

    def keep(self, *tensors: torch.Tensor) -> None:
        """Let tensors stay, and forget how they were computed, from what, and with which inputs.

        For tensors that a program without an optimizer carries from step to step: weights that a
        function updates, a hidden state. Without it, every batch they came from is held to compute
        them again.

        Parameters
        ----------
        *tensors : torch.Tensor
            Of any shape.

        Raises
        ------
        BadInput
            Outside the region.
        BudgetExceeded
            If a tensor was evicted and has no room.
        """
        if self._runtime is None:
            raise BadInput("tensors can be kept inside the region only")
        for tensor in tensors:
            self._runtime.need(tensor, True)

    def report(self) -> OnlineReport:
        """Return counts of events so far, and where the time went."""
        if self._room is not None:
            self._peak_bytes = max(self._peak_bytes, self._room.peak_bytes())
        if self._runtime is not None:
            self._runtime.update_ledger()
        return self._ledger.report(self._peak_bytes, self._seen_by)

    def _set_up(self, around: contextlib.ExitStack) -> None:
        storages = storages_alive(self._device)
        before_bytes = sum(map(allocated_bytes, storages))
        if before_bytes >= self._budget_bytes:
            raise InfeasibleBudget(
                f"{format_bytes(before_bytes)} of tensors exist before the region begins, and the "
                f"budget for all is {format_bytes(self._budget_bytes)}",
                budget_bytes=self._budget_bytes,
            )
        room = room_on(self._budget_bytes, before_bytes, self._device)
        runtime = self._runtime_in(room)
        around.callback(runtime.close)
        runtime.know(storages)
        room.keep(runtime.room_maker)
        around.callback(room.open)
        around.enter_context(observed_addresses(runtime.need))
        around.enter_context(intercepted_resizing(runtime.resize))
        for register, hook in (
            (optimizer.register_optimizer_step_pre_hook, runtime.before_optimizer),
            (optimizer.register_optimizer_step_post_hook, runtime.after_optimizer),
        ):
            around.callback(register(hook).remove)
        self._room, self._runtime = room, runtime
        runtime.begin()

    def _runtime_in(self, room: Room) -> Core:
        """Return the core that intercepts operators."""
        why = ""
        if self._core != "Python" and not room.retries:
            waits = self._core == "C++"
            try:
                runtime = NativeRuntime(
                    room, self._ledger, self._policy, self._candidates, waits=waits
                )
            except CoreUnavailable as error:
                if waits:
                    raise BadInput(f"core='C++' cannot be had: {error}") from None
                if isinstance(error, ForLaterReleases):
                    _announce_once(_in_python(str(error)))
                elif not isinstance(error, BeingCompiled):
                    _warn_once(str(error))
                why = f" ({error})"
            else:
                self._seen_by = runtime.name
                return runtime
        self._seen_by = f"{Runtime.name}{why}"
        pool = Pool(self._policy, self._ledger, self._candidates)
        return Runtime(room, pool, self._ledger)


@functools.cache
def _warn_once(reason: str) -> None:
    """Warn of the reason why the faster core is not used."""
    warnings.warn(
        f"{_in_python(reason)}. core='Python' asks for this core and ends the warning", stacklevel=5
    )


def _in_python(reason: str) -> str:
    return (
        "tightfit.online sees operators in Python, which costs each some 25 us: the core in C++ "
        f"cannot be had: {reason}"
    )


_announce_once = functools.cache(announce)
