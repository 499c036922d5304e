"""The contents that may be evicted, in the order of the policies of `eviction/`.

Two things are added to a policy's score, which the runtime needs to be stable. Tensors that the
last few operators have used are evicted last, and so are gradients in flight, independently of the
policy.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter_ns

from tightfit.dynamic.history import Call, Content
from tightfit.dynamic.ledger import Ledger
from tightfit.eviction.classes import Classes
from tightfit.eviction.policies.policy import Cost, Policy, cost_of
from tightfit.torch_private.storages import take_memory

_RECENT_OPS = 8
_MOST_ANCESTORS = 512
_LEAST_SAMPLE = 64
_SHARE_OF_SAMPLE = 4


@dataclass(frozen=True)
class Candidates:
    """Which contents an eviction looks at.

    `smallest_bytes`: smaller contents are left alone. `are_all_scored`: whether every candidate is
    scored at every eviction. False: a sample as large as the square root of their number, but of 64
    at least (Kirisame et al., appendix E.2).
    """

    smallest_bytes: int
    are_all_scored: bool


class Pool:
    """The contents that may be evicted.

    `policy`: chooses the next. `ledger`: the clock, and where times are written down. `candidates`:
    which of them are scored.
    """

    def __init__(self, policy: Policy, ledger: Ledger, candidates: Candidates) -> None:
        self._policy = policy
        self._ledger = ledger
        self._eligible = candidates
        self._contents: list[Content] = []
        self._positions: dict[Content, int] = {}
        self._retired: dict[Content, None] = {}
        self._costs_are_known = False
        self._classes = Classes() if policy.cost is Cost.CLASSES else None
        self._random = random.Random(0)

    def offer(self, content: Content) -> None:
        """Let a resident content be evicted, if it can be computed again."""
        if content.size_bytes < self._eligible.smallest_bytes or content.maker is None:
            return
        if content not in self._positions:
            self._positions[content] = len(self._contents)
            self._contents.append(content)

    def is_small(self, content: Content) -> bool:
        return content.size_bytes < self._eligible.smallest_bytes

    def withdraw(self, content: Content) -> None:
        """Let a content not be evicted any more; it may be gone."""
        position = self._positions.pop(content, None)
        if position is not None:
            last = self._contents.pop()
            if last is not content:  # the last takes its place
                self._contents[position] = last
                self._positions[last] = position
        if self._retired:
            self._retired.pop(content, None)

    def free(self, lacking_bytes: int) -> bool:
        """Evict until so many bytes are free, or nothing is left; return whether any were."""
        started = perf_counter_ns()
        scoring_ns = freed_bytes = 0
        while freed_bytes < lacking_bytes:
            before = perf_counter_ns()
            candidates = self._candidates()
            ranked = self._ranked(candidates)
            scoring_ns += perf_counter_ns() - before
            if not ranked:
                break
            most = max(1, len(ranked) // _SHARE_OF_SAMPLE)
            for _ in range(len(ranked) if self._eligible.are_all_scored else most):
                content = self._next(ranked)
                freed_bytes += content.size_bytes
                self.evict(content)
                if freed_bytes >= lacking_bytes:
                    break
        self._ledger.searched_since(started, scoring_ns)
        return freed_bytes > 0

    def drop(self, content: Content) -> None:
        """Free contents that only the runtime holds."""
        self.withdraw(content)
        content.leave()
        self.left(content)

    def retire(self, content: Content) -> None:
        """Evict a content before all others: it was brought back for calls that have run."""
        if not self._policy.keeps_dead and content.maker is not None:
            self._retired[content] = None

    def sweep(self) -> None:
        """Free retired contents: the operator that others were brought back for has run."""
        while self._retired:
            content, _ = self._retired.popitem()
            if content.is_private and not content.locks:
                self.drop(content)

    def ended(self, content: Content) -> None:
        """Note that the program has freed a resident content."""
        self.withdraw(content)
        content.lose_storage()
        self.left(content)

    def left(self, content: Content) -> None:
        """Note that a content is not resident any more: it joins its evicted neighbours' class."""
        if self._costs_are_known:
            _forget_costs_after(content)
        if self._classes is None or content.maker is None:
            return
        node = self._classes.add(content.maker.cost)
        content.join((self._classes, node))
        for other in self._adjacent_nodes(content):
            self._classes.join(node, other)

    def came_back(self, content: Content) -> None:
        """Note that an evicted content is about to be resident again."""
        if self._costs_are_known:
            _forget_costs_after(content)
        if self._classes is not None and content.maker is not None and content.node is not None:
            self._classes.leave(content.node[1], content.maker.cost)

    def evict(self, content: Content) -> None:
        """Take the memory of a content that can be computed again."""
        self.withdraw(content)
        storage = content.memory
        if storage is not None:
            take_memory(storage)
        if content.maker is not None and content.is_held:
            content.maker.keep_reads()
        content.leave()
        self.left(content)
        self._ledger.evicted()

    # -- the search ------------------------------------------------------------------------------

    def _ranked(self, candidates: list[Content]) -> list[tuple[float, int, Content]]:
        """Return a heap of candidates by score; those alike in the order they are in."""
        if self._policy.cost is Cost.RANDOM:
            scores = [self._random.random() for _ in candidates]
        else:
            scores = [self._score(content) for content in candidates]
        ranked = [*zip(scores, range(len(candidates)), candidates, strict=True)]
        heapq.heapify(ranked)
        return ranked

    def _next(self, ranked: list[tuple[float, int, Content]]) -> Content:
        """Take the content with the least score; scores rise when neighbours are evicted."""
        while self._policy.cost is not Cost.RANDOM:
            before, order, content = ranked[0]
            score = self._score(content)
            if score <= before:
                break
            heapq.heapreplace(ranked, (score, order, content))
        return heapq.heappop(ranked)[2]

    def _score(self, content: Content) -> float:
        staleness = self._ledger.clock - content.used_at + 1
        weight = self._policy.weight_of(content.size_bytes, staleness)
        return self._cost(content) / weight if weight > 0 else math.inf

    def _candidates(self) -> list[Content]:
        """Candidates for eviction, or a sample: retired contents, else the first turn there is."""
        if self._retired:
            retired = [c for c in self._retired if c.is_private and not c.locks]
            if retired:
                return retired
        if self._eligible.are_all_scored:
            return self._first_turn(self._contents)[1]
        size = max(_LEAST_SAMPLE, math.isqrt(len(self._contents)))
        if size >= len(self._contents):
            return self._first_turn(self._contents)[1]
        turn, found = self._first_turn(self._random.sample(self._contents, size))
        if turn:  # another may come earlier
            found = self._first_turn(self._contents)[1]
        return found if len(found) <= size else self._random.sample(found, size)

    def _first_turn(self, contents: list[Content]) -> tuple[int, list[Content]]:
        """Return the first turn that any of them has, and those whose turn it is.

        Gradients in flight and contents just used go only if nothing else may. Contents that a call
        waits for go last of all: they will have to come back.
        """
        latest = self._ledger.operators - _RECENT_OPS
        turns: tuple[list[Content], ...] = ([], [], [], [])
        for content in contents:
            if content.locks:
                if not content.fast_locks:
                    turns[3].append(content)
            elif content.last_op > latest:
                turns[2].append(content)
            else:
                turns[content.is_backward].append(content)
        return next(((n, found) for n, found in enumerate(turns) if found), (3, []))

    # -- terms of a score --------------------------------------------------------------------------

    def _cost(self, content: Content) -> float:
        known = content.known_cost
        return cost_of(self._policy.cost, self, content) if known is None else known

    def own_cost(self, content: Content) -> int:
        return 0 if content.maker is None else content.maker.cost

    def costs_before(self, content: Content) -> list[int]:
        return [*map(self.own_cost, _region(content, _parents))]

    def costs_after(self, content: Content) -> list[int]:
        return [*map(self.own_cost, _region(content, _children))]

    def cost_of_classes(self, content: Content) -> float:
        assert self._classes is not None
        return self._classes.cost(self._adjacent_nodes(content))

    def cost_of_operators(self, content: Content) -> int:
        """Return the cost of all operators that would have to run, each once; keep it in mind."""
        assert content.maker is not None
        calls = content.maker, *_calls_before(content.maker)
        cost = sum(call.cost for call in calls)
        content.know_cost(cost)
        self._costs_are_known = True
        return cost

    def _adjacent_nodes(self, content: Content) -> list[int]:
        """The nodes of the neighbours that are not resident."""
        nodes = [c.node for c in (*_parents(content), *_children(content)) if not c.is_resident]
        return [node[1] for node in nodes if node is not None and node[0] is self._classes]


def _parents(content: Content) -> Iterator[Content]:
    return iter(() if content.maker is None else content.maker.reads)


def _children(content: Content) -> Iterator[Content]:
    for call in content.readers:
        yield from (output for output in call.outputs if output is not None)


def _calls_before(call: Call) -> list[Call]:
    """The calls that would have to run before a call: each once, and no more than 512 of them."""
    found: dict[Call, None] = {}
    front = [call]
    while front and len(found) < _MOST_ANCESTORS:
        for content in front.pop().reads:
            maker = content.maker
            if not content.is_resident and maker is not None:
                content.know_cost(maker.cost)  # counted: readers learn of a change
                if maker not in found:
                    found[maker] = None
                    front.append(maker)
    found.pop(call, None)
    return list(found)


def _forget_costs_after(content: Content) -> None:
    """Forget the cost of a content, and the costs of contents that would need it first."""
    content.know_cost(None)
    front = [content]
    while front:
        for other in _children(front.pop()):
            if other.known_cost is not None:
                other.know_cost(None)
                if not other.is_resident:
                    front.append(other)


def _region(content: Content, neighbours: object) -> dict[Content, None]:
    """Evicted contents that are reached through evicted contents only."""
    assert callable(neighbours)
    found: dict[Content, None] = {}
    front = [content]
    while front and len(found) < _MOST_ANCESTORS:
        for other in neighbours(front.pop()):
            if not other.is_resident and other is not content and other not in found:
                found[other] = None
                front.append(other)
    return found
