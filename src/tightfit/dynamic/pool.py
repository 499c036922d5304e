"""What may be evicted, and who goes first: the policies of `eviction/` at work.

Two things are added to a policy's score, which the runtime needs to be stable: what the last few
operators have used goes last, and so do gradients under way, whatever the policy says of them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from time import perf_counter_ns

from tightfit.dynamic.history import Call, Content
from tightfit.dynamic.ledger import Ledger
from tightfit.eviction.classes import Classes
from tightfit.eviction.policies.policy import Cost, Policy
from tightfit.torch_private.storages import take_memory

__all__ = ["Pool"]

_RECENT_OPS = 8
_MOST_ANCESTORS = 512
_LEAST_SAMPLE = 64


class Pool:
    """The contents that may be evicted.

    Parameters
    ----------
    policy : Policy
        Who goes first.
    ledger : Ledger
        The clock, and where times are written down.
    smallest_bytes : int
        Smaller ones are left alone.
    look_at_all : bool
        Whether every candidate is scored at every eviction. False: a sample as large as the square
        root of their number, but of 64 at least (Kirisame et al., appendix E.2).
    """

    def __init__(
        self, policy: Policy, ledger: Ledger, *, smallest_bytes: int, look_at_all: bool
    ) -> None:
        self._policy = policy
        self._ledger = ledger
        self._smallest_bytes = smallest_bytes
        self._look_at_all = look_at_all
        self._contents: dict[Content, None] = {}
        self._retired: dict[Content, None] = {}
        self._classes = Classes() if policy.cost is Cost.CLASSES else None
        self._random = random.Random(0)

    def offer(self, content: Content) -> None:
        """A content is resident: it may be evicted if it can be computed again."""
        if content.maker is not None and content.size_bytes >= self._smallest_bytes:
            self._contents[content] = None

    def is_small(self, content: Content) -> bool:
        return content.size_bytes < self._smallest_bytes

    def withdraw(self, content: Content) -> None:
        """A content may not be evicted any more, or is gone."""
        self._contents.pop(content, None)
        self._retired.pop(content, None)

    def free(self, lacking_bytes: int) -> bool:
        """Evict until so many bytes are free, or nothing is left; return whether any were."""
        started = perf_counter_ns()
        freed_bytes = 0
        while freed_bytes < lacking_bytes:
            content = self._victim()
            if content is None:
                break
            freed_bytes += content.size_bytes
            self._evict(content)
        self._ledger.spend("search", started)
        return freed_bytes > 0

    def drop(self, content: Content) -> None:
        """Free what nobody but the runtime holds."""
        self.withdraw(content)
        content.leave()
        self.left(content)

    def retire(self, content: Content) -> None:
        """What was brought back for others is not needed by them now: it goes first of all."""
        if not self._policy.keeps_dead and content.maker is not None:
            self._retired[content] = None

    def sweep(self) -> None:
        """Free what was retired: the operator that others were brought back for has run."""
        while self._retired:
            content, _ = self._retired.popitem()
            if content.is_private and not content.locks:
                self.drop(content)

    def left(self, content: Content) -> None:
        """A content is not resident any more: it joins the class of what is evicted beside it."""
        if self._classes is None or content.maker is None:
            return
        node = self._classes.add(content.maker.cost)
        content.join((self._classes, node))
        for other in self._beside(content):
            self._classes.join(node, other)

    def came_back(self, content: Content) -> None:
        """A content that was gone is about to be resident."""
        if self._classes is not None and content.maker is not None and content.node is not None:
            self._classes.leave(content.node[1], content.maker.cost)

    # -- the search ------------------------------------------------------------------------------

    def _evict(self, content: Content) -> None:
        self.withdraw(content)
        storage = content.memory
        if storage is not None:
            take_memory(storage)
        if content.maker is not None and content.is_held:
            content.maker.keep_reads()
        content.leave()
        self.left(content)
        self._ledger.counts["evictions"] += 1

    def _victim(self) -> Content | None:
        candidates = self._candidates()
        if not candidates:
            return None
        if self._policy.cost is Cost.RANDOM:
            return self._random.choice(candidates)
        if not self._look_at_all:
            size = max(_LEAST_SAMPLE, math.isqrt(len(candidates)))
            if size < len(candidates):
                candidates = self._random.sample(candidates, size)
        started = perf_counter_ns()
        score = self._policy.score
        victim = min(candidates, key=lambda content: score(_Candidate(self, content)))
        self._ledger.spend("scoring", started)
        return victim

    def _candidates(self) -> list[Content]:
        """What may go: gradients under way and what was just used only if nothing else may.

        What somebody waits for goes last of all: it will have to come back.
        """
        retired = [c for c in self._retired if c.is_private and not c.locks]
        if retired:
            return retired
        loose = [content for content in self._contents if not content.fast_locks]
        free = [content for content in loose if not content.locks]
        latest = self._ledger.operators - _RECENT_OPS
        first = [c for c in free if c.last_op <= latest and not c.is_backward]
        return first or [c for c in free if c.last_op <= latest] or free or loose

    # -- what a score may ask --------------------------------------------------------------------

    def staleness(self, content: Content) -> int:
        return self._ledger.clock - content.used_at + 1

    def cost(self, content: Content, kind: Cost) -> float:
        """Return what `Cost` says of a content, as things are now."""
        assert content.maker is not None
        own = content.maker.cost
        match kind:
            case Cost.NONE | Cost.RANDOM:
                return 1
            case Cost.LOCAL:
                return own
            case Cost.OPERATORS:
                return own + sum(call.cost for call in _calls_before(content.maker))
            case Cost.BEFORE:
                return own + sum(_cost_of(c) for c in _region(content, _parents))
            case Cost.AROUND:
                return own + sum(_cost_of(c) for c in _around(content))
            case Cost.COUNT:
                return 1 + len(_around(content))
            case Cost.CLASSES:
                assert self._classes is not None
                return own + self._classes.cost(self._beside(content))

    def _beside(self, content: Content) -> list[int]:
        """The nodes of the neighbours that are not resident."""
        nodes = [c.node for c in (*_parents(content), *_children(content)) if not c.is_resident]
        return [node[1] for node in nodes if node is not None and node[0] is self._classes]


class _Candidate:
    """What a policy may know of a content (`tightfit.eviction.policies.policy.Candidate`)."""

    __slots__ = ("_content", "_pool")

    def __init__(self, pool: Pool, content: Content) -> None:
        self._pool = pool
        self._content = content

    @property
    def size_bytes(self) -> int:
        return self._content.size_bytes

    @property
    def staleness(self) -> float:
        return self._pool.staleness(self._content)

    def cost(self, kind: Cost) -> float:
        return self._pool.cost(self._content, kind)


def _cost_of(content: Content) -> int:
    return 0 if content.maker is None else content.maker.cost


def _parents(content: Content) -> Iterator[Content]:
    return iter(() if content.maker is None else content.maker.reads)


def _children(content: Content) -> Iterator[Content]:
    for call in content.readers:
        yield from (output for output in call.outputs if output is not None)


def _calls_before(call: Call) -> list[Call]:
    """The calls that would have to run before one: each once, and no more than 512 of them."""
    found: dict[Call, None] = {}
    front = [call]
    while front and len(found) < _MOST_ANCESTORS:
        for content in front.pop().reads:
            maker = content.maker
            if not content.is_resident and maker is not None and maker not in found:
                found[maker] = None
                front.append(maker)
    found.pop(call, None)
    return list(found)


def _region(content: Content, neighbours: object) -> dict[Content, None]:
    """What is not resident and is reached through such only."""
    assert callable(neighbours)
    found: dict[Content, None] = {}
    front = [content]
    while front and len(found) < _MOST_ANCESTORS:
        for other in neighbours(front.pop()):
            if not other.is_resident and other is not content and other not in found:
                found[other] = None
                front.append(other)
    return found


def _around(content: Content) -> dict[Content, None]:
    return _region(content, _parents) | _region(content, _children)
