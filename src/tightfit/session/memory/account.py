"""The account of memory held around the steps of a fitted callable: by tensors, and by the
allocator."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, Literal

import torch
from torch import nn

from tightfit.allocator.resident import (
    FirstStorages,
    element_bytes,
    granularity_of,
    is_part,
    resident_tensor_bytes,
)
from tightfit.allocator.tally import Refusals, Tally, before_refusals, tally_for
from tightfit.living import Living
from tightfit.session.memory.devices import device_of_modules, library_bytes, new_gradient_bytes
from tightfit.session.memory.forecast import growing_bytes
from tightfit.session.memory.held_at_call import HeldAtCall
from tightfit.session.memory.loop_peaks import LoopPeaks
from tightfit.session.memory.optimizers import Optimizers, parameters_of
from tightfit.session.memory.since import SinceLastCall
from tightfit.session.processes import Replicas
from tightfit.torch_private.engine import in_backward

_State = Literal["free", "resting", "running"]
"""Of a limit: not enforced; enforced between steps; enforced while a step is running."""


class Account:
    """Counts the memory that a fitted callable holds between its steps: the only place that does.

    `modules`: the modules whose parameters it uses. `optimizer`: the user's; others are found.
    `tally`: has counted allocated bytes before; None: counting begins now. `device`: the GPU that
    holds anything of the modules, else the CPU. `replicas`: the DistributedDataParallel around it.
    `optimizers`: those that hold any of the parameters. `since`, `loop_peaks`: the training loop.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], optimizer: Any, tally: Tally | None = None
    ) -> None:
        self.modules = modules
        self.replicas: Replicas | None = None
        self.device = device_of_modules(modules)
        self.optimizers = Optimizers(modules, optimizer, self.granularity_bytes)
        self._tally = tally or self._new_tally()
        self._first = FirstStorages(self._members())  # of the members at the beginning
        self._limit_bytes: int | None = None
        self._limited_with: weakref.WeakSet[Account] = weakref.WeakSet()
        self._state: _State = "free"
        self._before_now = 0
        self._given_at_count = -1
        self._known: tuple[Any, HeldAtCall] | None = None
        # Bytes that others held when so many were allocated
        self._counted: weakref.WeakKeyDictionary[Account, tuple[int, int]] = (
            weakref.WeakKeyDictionary()
        )
        self._trains = True
        self.hooks_step = False  # in the backward, and free the gradients
        self.since, self.loop_peaks = SinceLastCall(), LoopPeaks(self.device, self._tally)

    @property
    def tally(self) -> Tally | None:
        """Counts the bytes allocated; None where nothing can."""
        return self._tally

    # -- memory that exists -------------------------------------------------------------------

    @property
    def granularity_bytes(self) -> int:
        """The bytes to which the device's allocator rounds."""
        return granularity_of(self.device.type)

    def gradient_bytes(self) -> int:
        """Return the bytes of the gradients that exist now."""
        return resident_tensor_bytes(self._gradients(), self.granularity_bytes)

    def gradient_versions(self) -> int:
        """Return how often the gradients that exist were changed in place, added up."""
        return sum(gradient._version for gradient in self._gradients())

    def new_gradient_bytes(self, counted: Set[int] = frozenset()) -> int:
        """Return the bytes of the gradients that do not exist yet but will.

        `counted`: identities of parameters whose gradients are counted elsewhere.
        """
        if self.hooks_step:
            return 0
        without = counted | self.optimizers.stepped_in_backward | self.optimizers.without_gradient
        return new_gradient_bytes(self.modules, self.granularity_bytes, without)

    def note_step(self) -> None:
        """Note that an optimizer steps now."""
        self.hooks_step |= in_backward()

    def bucket_bytes(self) -> int:
        """Return the bytes of the buckets that gradients go into, if ranks train together."""
        return self.replicas.bucket_bytes(self.granularity_bytes) if self.replicas else 0

    def held_gradient_bytes(self) -> int:
        """Return the bytes of the gradients that exist and of the buckets they go into."""
        return self.gradient_bytes() + self.bucket_bytes()

    def existing_state_bytes(self) -> int:
        """Return the bytes of the optimizers' state that is there now.

        Not of state in the memory of members or gradients: `p.data = state["old"]` puts it there.
        """
        others = [*self._members(), *self._gradients()]
        return resident_tensor_bytes(self._states(), self.granularity_bytes, without=others)

    def coming_state_bytes(self, counted_elsewhere: Sequence[Account] = ()) -> int:
        """Return the bytes of the optimizers' state that will be there and is not yet.

        `counted_elsewhere`: those whose optimizers and parameters are counted elsewhere.
        """
        return self.optimizers.coming_bytes(
            self.device.type,
            counted=[optimizer for other in counted_elsewhere for optimizer in other.optimizers],
            counted_parameters=_parameters_of(counted_elsewhere),
        )

    def temporary_bytes(self) -> int:
        """Return the bytes taken in passing by an optimizer's step and by code until a call."""
        return max(self.optimizers.temporary_bytes(), self.loop_peaks.rise_bytes)

    def lasting_bytes(self) -> int:
        """Return the bytes held between steps; of optimizers, the state of the own parameters."""
        return lasting_bytes_of([self])

    def expected_bytes(self, counted_elsewhere: Sequence[Account] = ()) -> int:
        """Return the gradients and the optimizers' state that do not exist yet but will.

        `counted_elsewhere`: those whose optimizers and parameters are counted elsewhere.
        """
        if not self._trains:
            return 0
        self.optimizers.find()
        new_bytes = self.new_gradient_bytes(_parameters_of(counted_elsewhere))
        return new_bytes + self.coming_state_bytes(counted_elsewhere)

    def resident_bytes(self, inputs: Iterable[Any]) -> int:
        """Return all that is resident now, the inputs of a call, buckets and libraries included."""
        inputs = list(inputs)
        held = resident_tensor_bytes(inputs, self.granularity_bytes) + self.bucket_bytes()
        held += library_bytes(self.device) + self.held_at_call(inputs).others_bytes
        return held + self.lasting_bytes()

    def held_at_call(
        self,
        inputs: Sequence[Any],
        sharing: Sequence[Account] = (),
        input_bytes: int | None = None,
    ) -> HeldAtCall:
        """Return the memory held now, at the begin of a call.

        Where as many bytes are allocated as the last time, nothing is counted again.

        `inputs`: of the call; tensors among them count for it. `sharing`: of callables within the
        same budget.
        """
        given = self._tally.allocated_bytes() if self._tally is not None else None
        if input_bytes is None:
            input_bytes = element_bytes(inputs)
        running = 0
        if not _LIMITERS.are_only(self):
            others = (k for k in _LIMITERS.now() if k is not self)
            running = sum(k._state == "running" for k in others)
        known = self.optimizers.has_state(), self.optimizers.searches
        key = given, input_bytes, len(sharing), *known, running
        if given is None or self._known is None or self._known[0] != key:
            self._known = key, self._looked_up(inputs, sharing)
        return self._known[1]

    def _looked_up(self, inputs: Sequence[Any], sharing: Sequence[Account]) -> HeldAtCall:
        self._count_before()
        gradient_bytes = self.held_gradient_bytes()
        state_bytes, coming_bytes = self.existing_state_bytes(), self.coming_state_bytes()
        others_bytes = others_coming_bytes = 0
        earlier_inputs = earlier_parts = ()
        if self._tally is not None and self.replicas is None:
            tally, members = self._tally, self._own()
            own_bytes = tally.counted_bytes([*members, *inputs])
            others_bytes = tally.allocated_bytes() - own_bytes - library_bytes(self.device)
            # members of its own in whose place others are for a while are among them
            before_bytes = self._before_bytes_of(members)
            others_bytes += self._before_bytes((self, *sharing)) - before_bytes
            others_bytes -= self._left_to_others(sharing)
            others_coming_bytes = expected_bytes_of(sharing, (self,))
            given = _given(members, inputs)
            earlier_inputs = tuple(n for n, x in given if not tally.counted_bytes([x]))
            earlier_parts = tuple(n for n in earlier_inputs if is_part(inputs[n]))
        kept = gradient_bytes, state_bytes, coming_bytes
        earlier = earlier_inputs, earlier_parts
        return HeldAtCall(*kept, max(0, others_bytes), others_coming_bytes, *earlier)

    def _left_to_others(self, sharing: Sequence[Account]) -> int:
        """Return bytes that others that train in this process may hold, each in its own budget.

        While a step of such a callable runs, that is its whole budget: it is unknown which bytes
        are whose. Otherwise it is the bytes that last between its steps.
        """
        within = (self, *sharing)
        return sum(self._left_to(k) for k in self._limiters() if k not in within)

    def _left_to(self, limiter: Account) -> int:
        limit_bytes = limiter._limit_bytes or 0
        if limiter is self or limiter._state == "running" or self._tally is None:
            return limit_bytes
        given = self._tally.allocated_bytes()
        counted = self._counted.get(limiter)
        if counted is None or counted[0] != given:
            counted = self._counted[limiter] = given, self._tally.counted_bytes(limiter._own())
        return min(limit_bytes, counted[1])

    def _limiters(self) -> list[Account]:
        return [k for k in _LIMITERS.now() if k.device == self.device]

    def _before_bytes(self, accounts: Iterable[Account]) -> int:
        """Return bytes that some hold together and that existed before this tally began."""
        assert self._tally is not None
        return self._before_bytes_of([x for account in accounts for x in account._existing()])

    def _before_bytes_of(self, held: Sequence[torch.Tensor]) -> int:
        counted = self._tally.counted_bytes(held) if self._tally is not None else 0
        return max(0, resident_tensor_bytes(held, self.granularity_bytes) - counted)

    def _own(self) -> list[torch.Tensor]:
        return [*self._members(), *self._gradients(), *self._states()]

    def _members(self) -> list[torch.Tensor]:
        return [t for m in self.modules.values() for t in (*m.parameters(), *m.buffers())]

    def _existing(self) -> list[torch.Tensor]:
        """Return the own tensors, and first members in whose place others are for a while.

        `torch.func.functional_call` puts weights of the caller there, a trace its stand-ins: a
        request may be refused while a module runs that is measured.
        """
        own = self._own()
        return [*own, *self._first.others(own)]

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in parameters_of(self.modules) if p.is_leaf and p.grad is not None]

    def _states(self) -> list[torch.Tensor]:
        return [t for t in self.optimizers.tensors() if t.device.type == self.device.type]

    # -- the limit ----------------------------------------------------------------------------

    def set_limit(self, limit_bytes: int | None, sharing: Sequence[Account] = ()) -> None:
        """Have a limit, and refuse from now on every request that would exceed it.

        Not where more is held already: planning will say so, and name the bytes a plan needs.
        Models that were fitted with budgets of their own are not distinguished by an allocator:
        together they keep to the sum.

        `limit_bytes`: for all bytes allocated since this began, and for those that the modules and
        those sharing it had before; None: no limit. `sharing`: of callables within the same budget,
        which keep to it through this account.
        """
        within = (self, *sharing)
        if limit_bytes is not None and any(limiter not in within for limiter in _LIMITERS):
            gc.collect()  # those no longer alive keep to nothing
        self._limit_bytes, self._limited_with = limit_bytes, weakref.WeakSet(sharing)
        _LIMITERS.discard(self)
        if limit_bytes is not None:
            _LIMITERS.add(self)
        for other in sharing:
            other.set_limit(None)
        if limit_bytes is None:
            self.lift_limit()
            return
        self._count_before()
        self._change_state("running" if self._state == "running" else "resting")

    def enforce(self) -> None:
        """A step begins: its budget is all for it; others with their own budgets do not matter."""
        if self._tally is None or self._limit_bytes is None:
            return
        self._recount_before()
        self._change_state("running")

    def rest(self) -> None:
        """No step is running any more: refuse requests above all budgets together."""
        self._change_state("free" if self._limit_bytes is None else "resting")

    def lift_limit(self) -> None:
        """Refuse nothing until a step begins or ends."""
        self._change_state("free")

    def _change_state(self, state: _State) -> None:
        self._state = state
        tally = self._tally
        if tally is not None and _LIMITERS.are_only(self):
            is_kept = state != "free" and tally.limit == (self._limit_bytes, self._before_now)
            if not is_kept and (state == "free" or not self._refuse_above(self._limit_bytes or 0)):
                tally.set_limit(None, 0)
            return
        limiters = self._limiters()
        refusing = [limiter._tally for limiter in limiters if limiter._refuse_more(limiters)]
        if self._tally is not None and self._tally not in refusing:  # a copy has the same tally
            self._tally.set_limit(None, 0)

    def _refuse_more(self, limiters: Sequence[Account]) -> bool:
        """Refuse requests above the own limit and those of others, if it can be kept now."""
        if self._state == "free" or self._tally is None:
            return False
        if self._state == "resting":
            limit_bytes = sum(limiter._limit_bytes or 0 for limiter in limiters)
        else:
            limit_bytes = sum(map(self._left_to, limiters))
        return self._refuse_above(limit_bytes)

    def _refuse_above(self, limit_bytes: int) -> bool:
        """Refuse requests above a limit, if it can be kept now."""
        if self._tally is None or self.held_bytes() > limit_bytes:
            return False
        self._tally.set_limit(limit_bytes, self._before_now)
        return True

    def count_again(self) -> None:
        """Count existing bytes again: a request was refused, and there may be fewer now."""
        self._count_before()
        self._refuse_more(self._limiters())

    def _count_before(self) -> None:
        if self._tally is not None and self._limit_bytes is not None:
            within = (self, *self._limited_with)
            self._before_now = self._before_bytes(within)
            self._given_at_count = self._tally.allocated_bytes()

    def before_bytes(self) -> int:
        """Return the bytes held now that were allocated before the tally began."""
        self._recount_before()
        return self._before_now

    def _recount_before(self) -> None:
        """Count again if anything was allocated or freed: averaged weights may be elsewhere."""
        if self._tally is not None and self._tally.allocated_bytes() != self._given_at_count:
            self._count_before()

    @property
    def limit_bytes(self) -> int | None:
        return self._limit_bytes

    @property
    def limiter(self) -> Account | None:
        """The account through which it is limited: itself or another in its budget; None: none."""
        if self._limit_bytes is not None:
            return self
        return next((k for k in self._limiters() if self in k._limited_with), None)

    @property
    def _within_limit(self) -> list[Account]:
        return [self, *self._limited_with]

    @property
    def rests(self) -> bool:
        """Whether no step is running within its limit."""
        return self._state == "resting"

    def expected_within_limit_bytes(self) -> int:
        """Return gradients and state that will exist, of all that keep to its limit."""
        return expected_bytes_of(self._within_limit)

    def lasting_within_limit_bytes(self) -> int:
        """Return the bytes that all that keep to its limit hold between steps."""
        return lasting_bytes_of(self._within_limit)

    def coming_state_within_limit_bytes(self) -> int:
        """Return the optimizers' state that will exist, of all that keep to its limit."""
        within = [k for k in self._within_limit if k._trains]
        return sum(k.coming_state_bytes(within[:n]) for n, k in enumerate(within))

    def later_steps_bytes(self) -> int:
        """Return bytes held from a later optimizer's step to a call, with what is held now.

        Gradients and state of all that keep to its limit will exist: some may not have stepped yet.
        """
        temporary_bytes = max(each.temporary_bytes() for each in self._within_limit)
        return self.held_bytes() + self.expected_within_limit_bytes() + temporary_bytes

    def growing_within_limit_bytes(self) -> int:
        """Return by how much optimizers' state that exists will grow, within its limit."""
        training = (k for k in self._within_limit if k._trains)
        optimizers = {id(optimizer): optimizer for k in training for optimizer in k.optimizers}
        return sum(growing_bytes(o, self.granularity_bytes) for o in optimizers.values())

    def refusals(self) -> Refusals:
        """Return the requests that were refused because of the limit."""
        return self._tally.refusals() if self._tally is not None else Refusals()

    def held_bytes(self) -> int:
        """Return all that counts against the limit now; 0 where there is none."""
        if self._tally is None or self._limit_bytes is None:
            return 0
        return self._tally.allocated_bytes() + self._before_now

    # -- learning -----------------------------------------------------------------------------

    def locate(self) -> None:
        """Look again for the modules' device (they may have been moved), and for optimizers."""
        device = device_of_modules(self.modules)
        if device != self.device:
            self.device = device
            self._tally = self._new_tally()
            self._count_before()
        self._known = None

    def expect_training(self, trains: bool) -> None:
        """Expect gradients and optimizers' state, or neither: then it holds no more than now."""
        self._trains = trains

    def collect_garbage(self) -> bool:
        """Collect garbage; return whether less is allocated now."""
        before = self._tally.allocated_bytes() if self._tally is not None else 0
        gc.collect()
        self.locate()
        return self._tally is not None and self._tally.allocated_bytes() < before

    def join(self, replicas: Replicas) -> None:
        """Count the buckets of the DistributedDataParallel around, too."""
        self.replicas = replicas
        self._known = None

    def _new_tally(self) -> Tally | None:
        return tally_for(self.device, self._own())


def _given(own: Iterable[Any], inputs: Iterable[Any]) -> list[tuple[int, torch.Tensor]]:
    """Return the tensors among inputs with their places, members of its own left out."""
    owned = {id(t) for t in own}
    tensors = ((n, x) for n, x in enumerate(inputs) if isinstance(x, torch.Tensor))
    return [(n, x) for n, x in tensors if id(x) not in owned]


_LIMITERS: Living[Account] = Living()
"""The accounts that keep to a limit."""


def _count_all_again() -> None:
    for limiter in _LIMITERS:
        limiter.count_again()


before_refusals(_count_all_again)


def lift_every_limit() -> None:
    """Refuse nothing any more until a step begins or ends: training is over."""
    for limiter in _LIMITERS.now():
        limiter.lift_limit()


def lasting_bytes_of(accounts: Iterable[Account]) -> int:
    """Return the bytes that several accounts hold between steps; common tensors count once."""
    accounts = list(accounts)
    held = [tensor for account in accounts for tensor in account._own()]
    return resident_tensor_bytes(held, accounts[0].granularity_bytes) if accounts else 0


def expected_bytes_of(
    accounts: Iterable[Account], counted_elsewhere: Iterable[Account] = ()
) -> int:
    """Return the gradients and optimizers' state that do not exist yet but will.

    `accounts`: of callables within one budget; memory in common counts once. `counted_elsewhere`:
    those whose optimizers and parameters are counted elsewhere.
    """
    counted = list(counted_elsewhere)
    expected = 0
    for account in accounts:
        expected += account.expected_bytes(counted)
        counted.append(account)
    return expected


def _parameters_of(accounts: Iterable[Account]) -> set[int]:
    """Return the identities of the parameters of several accounts."""
    return {id(p) for account in accounts for p in parameters_of(account.modules)}
