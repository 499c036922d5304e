"""The compiled core as a region uses it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from tightfit.dynamic.core import Core
from tightfit.dynamic.ledger import Counts, Ledger
from tightfit.dynamic.native.build import compiled_core
from tightfit.dynamic.operators import operator_of
from tightfit.dynamic.pool import Candidates
from tightfit.dynamic.room import Room, allocated_bytes
from tightfit.errors import BadInput
from tightfit.eviction.policies.policy import Policy
from tightfit.torch_private.storages import free_failed_backward
from tightfit.torch_private.traces import operator_named


class NativeRuntime(Core):
    """Sees operators on a dispatch key below autograd, in C++.

    `ledger`: receives counts of events. `candidates`: which contents an eviction looks at. `waits`:
    until the core is compiled, where that is not done yet. Raises `CoreUnavailable` if the core
    cannot be compiled here. Raises `BeingCompiled` if it is not there yet and `waits` is False.
    """

    name = "C++"

    def __init__(
        self, room: Room, ledger: Ledger, policy: Policy, candidates: Candidates, *, waits: bool
    ) -> None:
        super().__init__(room)
        self._ledger = ledger
        self._module = compiled_core(waits=waits)
        self._core = self._module.Runtime(
            self,
            int(policy.cost),
            policy.by_size,
            policy.by_staleness,
            policy.keeps_dead,
            candidates.smallest_bytes,
            candidates.are_all_scored,
            ledger.most_again,
        )

    # -- calls by a region -------------------------------------------------------------------------

    def begin(self) -> None:
        self._core.begin()

    def end(self) -> None:
        self._core.end()

    def know(self, storages: Iterable[torch.UntypedStorage]) -> None:
        for storage in storages:
            self._core.know(storage._cdata, allocated_bytes(storage))

    @property
    def room_maker(self) -> int:
        """The address of the function that the allocator calls for room."""
        return self._module.address_of_make_room()

    def make_room(self, lacking_bytes: int) -> bool:
        return self._core.make_room(lacking_bytes)

    def need(self, tensor: torch.Tensor, is_permanent: bool) -> None:
        self._core.need(tensor, is_permanent)

    def resize(self, storage: torch.UntypedStorage, run: Callable[[], Any]) -> Any:
        if not self._core.is_known(storage._cdata):
            return run()
        self._core.before_resizing(storage._cdata)
        result = run()
        self._core.after_resizing(storage._cdata)
        return result

    def expect_writes(self, size_bytes: int) -> None:
        self._core.expect_writes(size_bytes)

    def end_step(self) -> None:
        self._core.end_step()

    def settle_all(self) -> int:
        return self._core.settle_all()

    def clean_up_failed_backward(self) -> None:
        self._core.clean_up_failed_backward()

    def close(self) -> None:
        self.stop_watching()
        self._core.close()
        del self._core  # it holds this in turn, where Python's collector cannot see it

    def update_ledger(self) -> None:
        """Add events since the last update to the ledger."""
        self._ledger.add(Counts(*self._core.take_counts()))

    def weights(self) -> tuple[int, int]:
        return self._core.weights()

    @property
    def refused(self) -> str:
        return self._core.refused()

    # -- calls by the core -------------------------------------------------------------------------

    def describe(self, name: str, overload: str) -> tuple[Any, ...]:
        """Return the facts about an operator, as module.cpp takes them."""
        function = operator_named(f"{name}.{overload}")
        operator = operator_of(function)
        arguments = [argument.name for argument in function._schema.arguments]
        return (
            operator.name,
            operator.is_composite,
            operator.is_view,
            operator.makes_blank,
            operator.draws,
            operator.repeats,
            operator.replaces,
            operator.weight,
            [argument.position for argument in operator.written],
            [argument.position for argument in operator.statistics],
            -1 if operator.training is None else operator.training.position,
            arguments.index("dtype") if operator.takes_dtype else -1,
        )

    def is_parameter(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a parameter, which is watched from now on."""
        if type(tensor) is not torch.nn.Parameter:
            return False
        if not self.watches(tensor):
            self.watch(tensor)
        return True

    def note_earlier_freed(self, size_bytes: int) -> None:
        """Note that a storage from before the region was freed."""
        self._room.note_earlier_freed(size_bytes)

    def free_failed_backward(self) -> None:
        """Free the graph of a backward that has raised."""
        free_failed_backward()

    def raise_exceeded(self, name: str) -> None:
        """Raise `BudgetExceeded` for an operator that does not fit."""
        raise self.exceeded(name)

    def raise_thrashes(self, times: float) -> None:
        """Raise `InfeasibleBudget`: computing again has cost so many times the step itself."""
        raise self._ledger.thrashing(times)

    def raise_bad_input(self, text: str) -> None:
        """Raise `BadInput` for a tensor that cannot be computed again."""
        raise BadInput(text)
