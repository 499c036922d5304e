"""Which outputs of a call have never received a gradient, so that plans may do without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from typing import Any

from tightfit.capture.captured import Captured
from tightfit.execution.reached import Reached
from tightfit.graph.ir import ValueId
from tightfit.graph.liveness import eager_peak_bytes

_SURE = 3  # steps
_MUCH = 0.01  # of the time of a step, or of the bytes it holds


class Usage:
    """Facts that backwards have shown about outputs of calls, by signature.

    An output that has received a gradient once is planned with one ever after: two heads may be
    trained in turns.
    """

    def __init__(self) -> None:
        self._used: dict[Any, frozenset[int]] = {}
        self._unused: dict[Any, frozenset[int]] = {}
        self._zero: dict[Any, frozenset[int]] = {}
        self._steps: Counter[Any] = Counter()

    def note(self, key: Any, reached: Reached) -> None:
        """Note which outputs of a call receive a gradient, now that its backward has begun."""
        used = self._used[key] = self._used.get(key, frozenset()) | reached.used
        self._unused[key] = (self._unused.get(key, frozenset()) | reached.unused) - used

    def settled(self, key: Any, captured: Captured | None = None) -> frozenset[int]:
        """Return the outputs to plan without a gradient, now that a step's backwards have begun.

        Those that were planned with a gradient and have received none in this step and before.

        `captured`: the step; outputs by which it would spare little keep their place in its plans.
        """
        unused = self._unused.pop(key, frozenset()) - self._zero.get(key, frozenset())
        self._steps[key] += bool(unused)
        if self._steps[key] < _SURE:
            return frozenset()
        if captured is not None and unused and not _saves_much(captured, unused):
            self._zero[key] = self._zero.get(key, frozenset()) | unused
            return frozenset()
        return unused


def _saves_much(captured: Captured, unused: Set[int]) -> bool:
    """Whether a step takes noticeably less without the gradients of some of its outputs.

    Most of it comes back by other ways, too, for example in a recurrent model that returns its
    state. Leaving out zeros is then not worth another trace for which the next step waits.

    `captured`: the step, with these gradients among its inputs; priced. `unused`: the outputs that
    receive none.
    """
    graph, joint = captured.graph, captured.joint
    used = {source.index for source in joint.sources if source.kind == "tangent"} - unused
    others = joint.made_from_gradients(used)
    spared = joint.made_from_gradients(unused) - others
    total_s, spared_s = 0.0, 0.0
    only: set[ValueId] = {captured.value_of[n] for n in joint.placeholders if n in spared}
    kept: set[ValueId] = set()
    for op, node in zip(graph.ops, captured.nodes, strict=True):
        way = op.alternatives[0]
        cost_s = min(variant.cost_s for variant in way.variants)
        total_s += cost_s
        if node in spared:
            spared_s += cost_s
            only |= {*way.reads}
        elif node in others:
            kept |= {*way.reads}
    held_bytes = sum(graph.values[value].size_bytes for value in only - kept)
    return spared_s > _MUCH * total_s or held_bytes > _MUCH * eager_peak_bytes(graph)
