"""The simulator in readable Python: the reference for `Simulator`, for logs of any form.

Kirisame et al., Dynamic Tensor Rematerialization (2021), appendix C. It is the reference for the
C++ core: plain, and recursive where the paper is, so deep chains of recomputation need the core.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from functools import partial

from support.reference.arena import Arena
from support.reference.state import Ledger, Stopped, Stored
from support.reference.terms import StoredTerms
from tightfit.errors import BadInput
from tightfit.eviction.classes import Classes
from tightfit.eviction.log.resolve import Event, Log, Operator
from tightfit.eviction.log.views import without_views
from tightfit.eviction.policies.policy import Cost, Policy, cost_of
from tightfit.eviction.replayed import (
    Deallocation,
    MomentKind,
    Placement,
    Replayed,
    Rules,
    Status,
)
from tightfit.eviction.simulator import Simulator


def simulate_in_python(
    simulator: Simulator,
    policy: Policy,
    budget_bytes: int,
    rules: Rules | None = None,
    seed: int = 0,
) -> Replayed:
    """Return the result of `Simulator.simulate`, moments included."""
    log, rules = simulator.log, rules or Rules()
    ledger = Ledger(budget_bytes, int(log.base_cost_ns * (rules.thrash - 1.0)))
    replay = _Replay(
        log if policy.views_run_again else without_views(log),
        policy,
        ledger,
        rules.deallocation,
        rules.placement,
        random.Random(seed).randrange,
    )
    status: Status = "ok"
    try:
        replay.run()
    except Stopped as stopped:
        status = stopped.status
    return ledger.found(status, looks=replay.classes.looks)


class _Candidate:
    """Facts for a policy about a storage; counts the storages it looks at.

    `adjacent_bytes`: bytes of holes that count as its own.
    """

    def __init__(self, replay: _Replay, number: int, adjacent_bytes: int = 0) -> None:
        self.replay = replay
        self.adjacent_bytes = adjacent_bytes
        self.number = number
        self.stored = replay.stored[number]

    @property
    def size_bytes(self) -> int:
        return self.stored.size_bytes + self.adjacent_bytes

    @property
    def staleness(self) -> float:
        return self.replay.ledger.clock_ns - self.stored.last_access_ns

    def cost(self, kind: Cost) -> float:
        return cost_of(kind, self.replay.terms, self.number)


class _Replay:
    """One replay, from the first occurrence to the results of the program."""

    def __init__(
        self,
        log: Log,
        policy: Policy,
        ledger: Ledger,
        deallocation: Deallocation,
        placement: Placement,
        draw: Callable[[int], int],
    ) -> None:
        self.log = log
        self.policy = policy
        self.ledger = ledger
        self.deallocation = deallocation
        self.placement: Placement = placement
        self.arena = Arena(0 if placement == "bytes" else ledger.budget_bytes)
        self.draw = draw
        self.stored: dict[int, Stored] = {}
        self.pool: dict[int, None] = {}
        self.classes = Classes()
        self.terms = StoredTerms(self.stored, self.classes, ledger)
        self.is_backward = False
        self.current = -1
        self.brought: list[int] = []  # storages that came back for waiting operators

    # -- the program -----------------------------------------------------------------------------

    def run(self) -> None:
        for event, number in self.log.occurrences:
            match event:
                case Event.CONSTANT | Event.COMPUTE:
                    self._run_first(number)
                    if event is Event.CONSTANT:
                        self._pin(self._storage(self.log.operators[number].outputs[0]))
                case Event.HOLD:
                    self._refuse_banished(number)
                    self.stored[self._storage(number)].hold(1)
                case Event.RELEASE:
                    self._release(self._storage(number))
                case Event.BACKWARD:
                    self.is_backward = True
        for tensor in self.log.held:
            if not self._is_defined(tensor):
                self._materialise(self.log.tensors[tensor].operator, tensor, depth=1)
            self._pin(self._storage(tensor))

    def _run_first(self, number: int) -> None:
        self.current = number
        operator = self.log.operators[number]
        for tensor in operator.outputs:
            self._create(tensor)
        first = operator.outputs[0] if operator.outputs else None
        self._materialise(number, first, depth=1, again=False)

    def _create(self, tensor: int) -> None:
        """Make a tensor known before it is computed: its storage, cost and neighbours."""
        _, number, maker, is_root = self.log.tensors[tensor]
        operator = self.log.operators[maker]
        if is_root:
            size_bytes = self.log.storages[number].size_bytes
            self.stored[number] = Stored(size_bytes, self.classes.add(0), self.is_backward)
        stored = self.stored[number]
        stored.add_operator(maker, operator.cost_ns)
        stored.hold(1)
        for argument in operator.arguments:
            parent = self._storage(argument)
            if parent != number and not self.stored[parent].is_banished:
                stored.add_parent(parent)
                self.stored[parent].add_child(number)

    def _release(self, number: int) -> None:
        stored = self.stored[number]
        stored.hold(-1)
        if stored.holders > 0 or self.deallocation == "ignore":
            return
        if self.deallocation == "banish":
            self._try_to_banish(number)
        elif stored.is_resident and not stored.is_pinned:
            self._evict(number, "evict_eager")

    # -- computing -------------------------------------------------------------------------------

    def _materialise(self, number: int, wanted: int | None, depth: int, again: bool = True) -> None:
        """Run an operator, and before it all operators that its arguments lack."""
        self.ledger.enter(depth)
        operator = self.log.operators[number]
        brought_before = len(self.brought)
        arguments = [(tensor, self._storage(tensor)) for tensor in operator.arguments]
        for _, storage in arguments:
            self.stored[storage].touch(self.ledger.clock_ns)
        missing = [pair for pair in arguments if not self._is_defined(pair[0])]
        for tensor, storage in arguments:
            if (tensor, storage) not in missing:
                self._lock(storage)
        for tensor, storage in missing:
            if not self._is_defined(tensor):
                self._refuse_banished(tensor)
                self._materialise(self.log.tensors[tensor].operator, tensor, depth + 1)
            self._lock(storage)
        self._compute(number, wanted, again=again)
        for _, storage in arguments:
            self._unlock(storage)
        self.ledger.stop_if_thrashing()
        if again and self.deallocation == "banish":
            self._retry_to_banish(number)
        if not self.policy.keeps_dead and self.deallocation == "eager":
            self._free_dead(number, brought_before, depth)

    def _compute(self, number: int, wanted: int | None, *, again: bool) -> None:
        operator = self.log.operators[number]
        temporaries = self._allocate(operator)
        self.ledger.compute(operator.cost_ns, again=again)
        made = [(tensor, self.stored[self._storage(tensor)]) for tensor in operator.outputs]
        twice_bytes = sum(
            stored.size_bytes
            for tensor, stored in made
            if self.log.tensors[tensor].is_root and (stored.is_resident or stored.is_banished)
        )
        siblings = [t for t, stored in made if t != wanted and not stored.is_banished]
        arriving = siblings if wanted is None else [*siblings, wanted]
        defined = [tensor for tensor in arriving if self._is_defined(tensor)]
        for tensor in arriving:
            self._define(tensor)
            if not again:
                self.stored[self._storage(tensor)].touch(self.ledger.clock_ns)
        if again:
            back = [tensor for tensor in (*arriving[-1:], *arriving[:-1]) if tensor not in defined]
            self.ledger.count("outputs", len(back))
            for tensor in back:
                kind = "remat" if tensor == wanted else "remat_sibling"
                self.ledger.note(kind, self.current, tensor)
        self.ledger.free(twice_bytes)
        for owner in temporaries:
            self.arena.give_back(owner)

    def _allocate(self, operator: Operator) -> list[int]:
        """Make room for all outputs, also those that are resident: they are made a second time."""
        needed_bytes = self.log.new_bytes(operator)
        temporaries: list[int] = []
        if self.placement == "bytes":
            while not self.ledger.fits(needed_bytes):
                self._evict_one()
        else:
            roots = [t for t in operator.outputs if self.log.tensors[t].is_root]
            for storage in map(self._storage, roots):
                stored = self.stored[storage]
                is_temporary = stored.is_resident or stored.is_banished
                owner = -1 - storage if is_temporary else storage
                self._place(stored.size_bytes, owner)
                temporaries += [owner] if is_temporary else []
            temporaries = [owner for owner in temporaries if not self._is_needed(owner)]
        self.ledger.allocate(needed_bytes)
        return temporaries

    def _is_needed(self, temporary: int) -> bool:
        """Keep a second copy if the first was evicted since, to place another output."""
        storage = -1 - temporary
        stored = self.stored[storage]
        if stored.is_resident or stored.is_banished:
            return False
        self.arena.hand_over(temporary, storage)
        return True

    def _place(self, size_bytes: int, owner: int) -> None:
        """Find addresses; evict until there is a hole."""
        while size_bytes and not self.arena.take(size_bytes, owner):
            lacks_bytes = self.arena.free_bytes < size_bytes
            if self.placement == "window" or (self.placement == "mixed" and not lacks_bytes):
                self._evict_window(size_bytes)
            else:
                self._evict_one()

    def _define(self, tensor: int) -> None:
        number = self._storage(tensor)
        stored = self.stored[number]
        if not stored.is_resident:
            if self.policy.cost is Cost.CLASSES:
                self.classes.leave(stored.node, stored.cost_ns)
            if not stored.locks and not stored.is_pinned:
                self.pool[number] = None
        stored.define(tensor)

    def _free_dead(self, number: int, before: int, depth: int) -> None:
        """Free storages that came back for an operator that has run, but for held ones."""
        waiting: list[int] = []
        for storage in self.brought[before:]:
            stored = self.stored[storage]
            if stored.is_resident and stored.is_dead:
                if stored.locks or stored.is_pinned:
                    waiting.append(storage)
                else:
                    self._evict(storage, "evict_eager")
        made = [self._storage(tensor) for tensor in self.log.operators[number].outputs]
        self.brought[before:] = [*waiting, *made]
        if depth == 1:
            for storage in made:
                if storage in self.pool and self.stored[storage].is_dead:
                    self._evict(storage, "evict_eager")
            self.brought.clear()

    # -- evicting --------------------------------------------------------------------------------

    def _evict_one(self) -> None:
        """Evict the candidate with the least score, the last of several; zero ends the search."""
        if not self.pool:
            raise Stopped("oom")
        if self.policy.cost is Cost.RANDOM:
            self.ledger.count("evaluations")
            self._evict([*self.pool][self.draw(len(self.pool))], "evict")
            return
        candidates = [*self.pool]
        if self.policy.backward_last:
            first = [n for n in candidates if not self.stored[n].is_backward]
            candidates = first or candidates
        lowest, least = candidates[0], math.inf
        for number in candidates:
            self.ledger.count("evaluations")
            score = self.policy.score(_Candidate(self, number, self._adjacent_hole_bytes(number)))
            if score <= least:
                lowest, least = number, score
            if score == 0:
                break
        self._evict(lowest, "evict")

    def _adjacent_hole_bytes(self, number: int) -> int:
        """Bytes of the holes next to a storage, where they count."""
        counts = self.placement in ("neighbours", "mixed") and self.stored[number].size_bytes > 0
        return self.arena.free_next_to(number) if counts else 0

    def _evict_window(self, size_bytes: int) -> None:
        """Evict neighbours together, of the backward pass only if nothing else makes room."""
        for only_first_class in (True, False) if self.policy.backward_last else (False,):
            price = partial(self._price, only_first_class=only_first_class)
            window = self.arena.cheapest_window(size_bytes, price)
            if window is not None:
                for number in window:
                    self._evict(number, "evict")
                return
        raise Stopped("oom")

    def _price(self, number: int, *, only_first_class: bool) -> float | None:
        """Cost over staleness, as a score without bytes; None if the storage may not go."""
        if number not in self.pool or (only_first_class and self.stored[number].is_backward):
            return None
        self.ledger.count("evaluations")
        candidate = _Candidate(self, number)
        cost = max(0.0, float(candidate.cost(self.policy.cost)))
        return cost / candidate.staleness if candidate.staleness > 0 else sys.float_info.max

    def _evict(self, number: int, kind: MomentKind) -> None:
        stored = self.stored[number]
        self.pool.pop(number, None)
        self.ledger.free(stored.size_bytes)
        self.arena.give_back(number)
        node = self.classes.add(stored.cost_ns)
        if self.policy.cost is Cost.CLASSES:
            for adjacent in self.terms.adjacent_nodes(number):
                self.classes.join(node, adjacent)
        stored.leave(node)
        self.ledger.count(kind)
        self.ledger.note(kind, self.current, self.log.storages[number].root)

    # -- banishing -------------------------------------------------------------------------------

    def _try_to_banish(self, number: int) -> None:
        """Free a dead storage for good, unless one of its children may have to come back."""
        stored = self.stored[number]
        if stored.locks or any(self.stored[n].is_evicted for n in stored.children):
            return
        if stored.is_resident:
            self._evict(number, "evict_eager")
        stored.banish()
        for child in stored.children:
            self._pin(child)
            self.stored[child].forget(number)
        for parent in stored.parents:
            self.stored[parent].forget(number)
            if self.stored[parent].is_dead:
                self._try_to_banish(parent)

    def _retry_to_banish(self, number: int) -> None:
        for tensor in self.log.operators[number].outputs:
            for parent in [*self.stored[self._storage(tensor)].parents]:
                if self.stored[parent].is_dead:
                    self._try_to_banish(parent)

    def _refuse_banished(self, tensor: int) -> None:
        if self.stored[self._storage(tensor)].is_banished:
            raise BadInput(f"{self.log.tensors[tensor].name!r} is used after its end")

    # -- small questions and steps -----------------------------------------------------------------

    def _storage(self, tensor: int) -> int:
        return self.log.tensors[tensor].storage

    def _is_defined(self, tensor: int) -> bool:
        return tensor in self.stored[self._storage(tensor)].defined

    def _pin(self, number: int) -> None:
        self.stored[number].pin()
        self.pool.pop(number, None)

    def _lock(self, number: int) -> None:
        self.stored[number].lock(1)
        self.pool.pop(number, None)

    def _unlock(self, number: int) -> None:
        stored = self.stored[number]
        stored.lock(-1)
        if stored.is_resident and not stored.locks and not stored.is_pinned:
            self.pool[number] = None
