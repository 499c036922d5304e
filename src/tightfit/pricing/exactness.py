"""Alternatives that do not keep their promise are left out: each is compared with the default.

On the step's own device, on drawn tensors: an alternative that claims ``"bitwise"`` has every bit
of the default, and ``"rounding"`` is near it. Verdicts are kept on disk, like costs. Where there is
little room, one result is kept as a hash of its bits while the other is made.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tightfit.capture.captured import Captured
from tightfit.capture.nodes import flat_outputs
from tightfit.pricing.claims import Claim, claims_of
from tightfit.pricing.comparisons import Comparisons, Verdict
from tightfit.progress import Progress

TOLERANCES: Mapping[torch.dtype, float] = {
    torch.float64: 1e-12,
    torch.float32: 3e-5,
    torch.float16: 1e-2,
    torch.bfloat16: 6e-2,
}
"""Limits of ``"rounding"``: the largest difference as a share of the default's largest number."""


@dataclass(frozen=True)
class ComparedStep:
    """A step whose alternatives are as exact as they say."""

    captured: Captured  # the step
    # The `id` of each call that was compared on fewer rows only: no plan may use it in this room
    on_rows: frozenset[int]
    # The `id` of each call that is still to be compared: no plan may use it before
    postponed: frozenset[int] = frozenset()


def without_inexact(captured: Captured, progress: Progress) -> Captured:
    """Return the step without the alternatives that are less exact than they say.

    Elementwise operators are compared once for each kind of arguments, others at every shape.
    """
    return compare_alternatives(captured, progress).captured


def compare_alternatives(
    captured: Captured,
    progress: Progress,
    *,
    room_bytes: int | None = None,
    postpones: bool = False,
    seconds: float = 0.0,
) -> ComparedStep:
    """Return the step as `without_inexact` does, from comparisons that take a limited room.

    Alternatives without room to be compared at their own size are compared on fewer rows of the
    batch. That is enough for an operator that treats each element or row by itself; with others
    that promise the same bits it only tells which larger budget to name. An alternative that does
    not run on fewer rows either is kept if it does not promise the same bits. Where the logits of a
    language model have no room, neither has the default that their replacement would be compared
    with.

    `room_bytes`: memory for a comparison. `postpones`: whether to leave long comparisons for later
    that no earlier process has made. `seconds`: how long to make those first that would be left for
    later.
    """
    claims = claims_of(captured)
    if not claims:
        return ComparedStep(captured, frozenset())
    comparisons = Comparisons(captured, room_bytes)
    if postpones and seconds > 0:
        comparisons.go_on(claims.values(), time.perf_counter() + seconds, set())
    postponed = comparisons.long_comparisons(claims.values()) if postpones else frozenset[str]()
    compared = {p: claim for p, claim in claims.items() if claim.kind not in postponed}
    verdicts = comparisons.verdicts(compared.values(), progress)
    kept = {place for place, claim in compared.items() if _is_kept(claim, verdicts)}
    later = claims.keys() - compared.keys()
    broken = {id(claims[place].call) for place in claims.keys() - kept - later}
    if broken:
        captured = captured.keeping(lambda op, way, call: id(call) not in broken)
    on_rows = {id(claims[place].call) for place in kept if claims[place].key in comparisons.on_rows}
    return ComparedStep(captured, frozenset(on_rows), frozenset(id(claims[p].call) for p in later))


class GradualComparison:
    """Compares the alternatives of a step turn by turn; `compare_alternatives` has the results."""

    def __init__(self, captured: Captured) -> None:
        self._captured = captured
        self._tried: set[str] = set()

    @functools.cached_property
    def _claims(self) -> tuple[Claim, ...]:
        return tuple(claims_of(self._captured).values())

    def go_on(self, seconds: float, room_bytes: int) -> bool:
        """Compare for so long; return whether all have been compared.

        `seconds`: after which nothing more is begun; one comparison is made in any case.
        `room_bytes`: memory for a comparison.
        """
        until = time.perf_counter() + seconds
        return Comparisons(self._captured, room_bytes).go_on(self._claims, until, self._tried)


def _is_kept(claim: Claim, verdicts: Mapping[str, Verdict]) -> bool:
    """Whether a claim was found true; lossy ones only promise results of the same kind."""
    verdict = verdicts.get(claim.key) or verdicts.get(claim.kind)
    if verdict is None:
        return claim.exactness != "bitwise"
    if verdict.difference < 0:
        return False
    if claim.exactness == "lossy":
        return True
    dtype = next(x.dtype for n in claim.default.nodes() for x in flat_outputs(n))
    allowed = 0.0 if claim.exactness == "bitwise" else TOLERANCES.get(dtype, 0.0)
    return verdict.difference <= allowed
