"""Which outputs of a call have never received a gradient: plans may do without it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from typing import Any

from tightfit.capture.captured import Captured
from tightfit.execution.reached import Reached
from tightfit.graph.ir import ValueId
from tightfit.graph.liveness import eager_peak_bytes

OTHER_GRADIENTS = "an output that had no gradient before has one"
OTHER_STRIDES = "gradients of outputs have other strides than the outputs"

_SURE = 3  # steps
_MUCH = 0.01  # of the time of a step, or of the bytes it holds


class OutputGradients:
    """Which outputs of calls have received gradients, by signature.

    An output that has once received a gradient is planned with a gradient from then on, as two
    heads may be trained in turns.
    """

    def __init__(self) -> None:
        self._used: dict[Any, frozenset[int]] = {}
        self._unused: dict[Any, frozenset[int]] = {}
        self._zero: dict[Any, frozenset[int]] = {}
        self._steps: Counter[Any] = Counter()

    def note(self, key: Any, reached: Reached) -> None:
        used = self._used[key] = self._used.get(key, frozenset()) | reached.used
        self._unused[key] = (self._unused.get(key, frozenset()) | reached.unused) - used

    def end_step(self, key: Any, captured: Captured | None = None) -> frozenset[int]:
        """Return outputs to plan without a gradient, now that the backwards of a step have begun.

        They were planned with a gradient, and have received none in this step or before.

        `captured`: the step; outputs without whose gradients it would save little are left out.
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
    """Whether a step takes much less time or memory without the gradients of some outputs.

    In a recurrent model that returns its state, for example, other outputs need most of the
    backward, too. Another capture, for which the next step waits, is then not worth it.

    `captured`: the priced step, with these gradients among its inputs.
    """
    graph, joint = captured.graph, captured.joint
    used = {source.index for source in joint.sources if source.kind == "tangent"} - unused
    others = joint.made_from_gradients(used)
    unneeded = joint.made_from_gradients(unused) - others
    total_s, unneeded_s = 0.0, 0.0
    only: set[ValueId] = {captured.value_of[n] for n in joint.placeholders if n in unneeded}
    kept: set[ValueId] = set()
    for op, node in zip(graph.ops, captured.nodes, strict=True):
        default = op.alternatives[0]
        cost_s = min(variant.cost_s for variant in default.variants)
        total_s += cost_s
        if node in unneeded:
            unneeded_s += cost_s
            only |= {*default.reads}
        elif node in others:
            kept |= {*default.reads}
    held_bytes = sum(graph.values[value].size_bytes for value in only - kept)
    return unneeded_s > _MUCH * total_s or held_bytes > _MUCH * eager_peak_bytes(graph)
