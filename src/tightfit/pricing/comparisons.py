"""Compares alternatives of a step with their defaults, and keeps the results."""

from __future__ import annotations

import hashlib
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch
from torch import fx

from tightfit.allocator.refusals import is_refusal, unless_refused
from tightfit.capture.captured import Call, Captured
from tightfit.capture.nodes import flat_outputs, storage_bytes
from tightfit.costs.cache import Cache
from tightfit.costs.measured.call import SHORT_S, environment_of
from tightfit.graph.ir import ValueId
from tightfit.pricing.claims import Claim
from tightfit.pricing.fewer_rows import FewerRows, rows_of, shortened
from tightfit.pricing.keys import key_of, name_of
from tightfit.pricing.records import DOES_NOT_RUN, Brief, keep
from tightfit.pricing.trial import Results, Trial
from tightfit.progress import Progress

_TYPICAL_BYTES = 4 << 20  # read by the comparison of an elementwise operator
_MUCH_BYTES = 1 << 20  # read at least by a comparison that may be put off
_UNLIKE = -1.0
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a number


class Verdict(msgspec.Struct, frozen=True):
    """How an alternative compared."""

    # The largest as a share of the default's largest number. 0: every bit is equal. -1: the result
    # has another shape, type or layout, or is unknown.
    difference: float


@dataclass(frozen=True)
class _DefaultResults:
    """The results of a default on random tensors."""

    default: Call  # that ran
    trial: Trial  # has the tensors
    expected: Results  # of the default


class Comparisons:
    """Compares alternatives of a step with their defaults.

    `on_rows`: the keys of claims of the same bits that were compared on fewer rows and not
    elementwise.
    """

    def __init__(self, captured: Captured, room_bytes: int | None) -> None:
        self._captured = captured
        self._room_bytes = room_bytes
        self._default = {n: c[0] for n, c in zip(captured.nodes, captured.calls, strict=True)}
        self._device = captured.joint.device
        self._cache = Cache(environment_of(self._device))
        self._default_results: _DefaultResults | None = None
        self.on_rows: set[str] = set()

    def verdicts(self, claims: Iterable[Claim], progress: Progress) -> dict[str, Verdict]:
        """Return verdicts by keys and by kinds; what has none had no room."""
        found: dict[str, Verdict] = {}
        missing = list(self._representatives(claims))
        progress.start("comparing alternatives", len(missing))
        try:
            for done, claim in enumerate(missing):
                progress.update(done, name_of(claim.call.function))
                verdict = self._known(claim) or self._found(claim)
                verdict = verdict or unless_refused(partial(self._compared_on_rows, claim))
                if verdict is not None:
                    found[claim.key] = found[claim.kind] = verdict
        finally:
            self._default_results = None
            self._cache.save()
            progress.stop()
        return found

    def long_comparisons(self, claims: Iterable[Claim]) -> frozenset[str]:
        """Return the kinds of claims that take long to compare and have no verdict yet."""
        return frozenset(
            claim.kind
            for claim in self._representatives(claims)
            if not claim.is_by_element
            and self._argument_bytes(claim) >= _MUCH_BYTES
            and self._known(claim) is None
        )

    def go_on(self, claims: Iterable[Claim], until: float, tried: set[str]) -> bool:
        """Compare claims without a verdict until some time; return whether none is left."""
        missing = [
            claim
            for claim in self._representatives(claims)
            if claim.key not in tried and self._known(claim) is None
        ]
        try:
            for done, claim in enumerate(missing):
                if done and time.perf_counter() >= until:
                    return False
                self._found(claim)
                tried.add(claim.key)
        finally:
            self._default_results = None
            self._cache.save()
        return True

    def _known(self, claim: Claim) -> Verdict | None:
        return self._cache.get(f"{Verdict.__name__}\n{claim.key}", Verdict)

    def _found(self, claim: Claim) -> Verdict | None:
        """Return the verdict of a comparison that is made now, and keep it; None: no room."""
        verdict = unless_refused(partial(self._compared, claim))
        if verdict is not None:
            self._cache.put(f"{Verdict.__name__}\n{claim.key}", verdict)
        return verdict

    def _representatives(self, claims: Iterable[Claim]) -> Iterable[Claim]:
        """Return one claim of each kind: it has room, and is neither large nor small."""
        alike: dict[str, list[Claim]] = defaultdict(list)
        for claim in claims:
            alike[claim.kind].append(claim)
        for claims in alike.values():
            sizes = [3 * self._argument_bytes(claim) for claim in claims]
            fitting = [pair for pair in zip(sizes, claims, strict=True) if self._has(pair[0])]
            if fitting:
                yield min(fitting, key=lambda pair: abs(pair[0] - _TYPICAL_BYTES))[1]
            else:
                yield min(zip(sizes, claims, strict=True), key=lambda pair: pair[0])[1]

    def _has(self, size_bytes: int) -> bool:
        """Whether there is room for so much."""
        return self._room_bytes is None or size_bytes <= self._room_bytes

    def _arguments(self, claim: Claim) -> set[fx.Node]:
        nodes = {*claim.default.nodes(), *claim.call.nodes()}
        for node in claim.call.rests_on:
            nodes |= {node, *self._default[node].nodes()}
        return nodes

    def _argument_bytes(self, claim: Claim) -> int:
        return sum(storage_bytes(x) for n in self._arguments(claim) for x in flat_outputs(n))

    def _compared(self, claim: Claim) -> Verdict | None:
        """Compare two results side by side, or if that is too much one after the other."""
        argument_bytes = self._argument_bytes(claim)
        if self._has(3 * argument_bytes):
            verdict = unless_refused(partial(self._compared_side_by_side, claim))
            if verdict is not None:
                return verdict
        self._default_results = None
        if not self._has(argument_bytes + claim.made_bytes):
            return None
        expected, made = (  # each may write over its arguments
            _hashes(self._trial(claim, copies=False).results(call))
            for call in (claim.default, claim.call)
        )
        if made.items() <= expected.items():
            return Verdict(0.0)
        return Verdict(_UNLIKE) if claim.exactness == "bitwise" else None

    def _compared_side_by_side(self, claim: Claim) -> Verdict:
        """Compare two results; the results of a default serve all alternatives of an op."""
        known, self._default_results = self._default_results, None
        trial = self._trial(claim)
        if known is None or known.default is not claim.default or not trial.is_drawn:
            known = _DefaultResults(claim.default, trial, self._results(trial, claim.default))
        if known.trial.is_drawn:
            self._default_results = known
        results = partial(self._results, known.trial)
        return _verdict(known.expected, partial(results, claim.call))

    def _results(self, trial: Trial, call: Call) -> Results:
        """Run a call; its cost is kept, and need not be measured another time."""
        if self._device.type != "cpu" or not trial.is_drawn:
            return trial.results(call)
        results, taken = trial.metered(call, self._device)
        if taken.cost_s >= SHORT_S:
            keep(self._cache, key_of(call), Brief.of(taken))
        return results

    def _trial(self, claim: Claim, *, copies: bool = True) -> Trial:
        call = claim.call
        return Trial(
            self._captured, self._default, call.rests_on, condition=call.condition, copies=copies
        )

    def _compared_on_rows(self, claim: Claim) -> Verdict | None:
        """Compare on as many rows as there is room for."""
        if self._room_bytes is None:
            return None
        nodes = sorted(self._arguments(claim), key=lambda node: node.name)
        argument_bytes, whole = self._argument_bytes(claim), rows_of(nodes)
        rows = min(whole - 1, whole * self._room_bytes // (4 * max(1, argument_bytes)))
        if rows < 1:
            return None
        given = {"defaults": self._default, "running": claim.call.rests_on}
        ways = shortened(self._captured, nodes, rows, **given)
        verdicts = (self._verdict_on(few, claim) for few in ways)
        verdict = next(
            (found for found in verdicts if found is not None and found.difference >= 0), None
        )
        if verdict is None:
            return None
        if claim.exactness == "bitwise" and not claim.holds_for_more_rows:
            self.on_rows.add(claim.key)
        return verdict

    def _verdict_on(self, few: FewerRows, claim: Claim) -> Verdict | None:
        """Return how an alternative compares on fewer rows; None: it does not run on them."""
        default, call = few.call(claim.default), few.call(claim.call)
        try:
            trial = Trial(self._captured, few.defaults, call.rests_on, condition=call.condition)
            return _verdict(trial.results(default), partial(trial.results, call))
        except DOES_NOT_RUN as error:
            if is_refusal(error):
                raise
            return None


def _verdict(expected: Results, run: Callable[[], Results]) -> Verdict:
    try:
        made = run()
    except Exception as error:
        if is_refusal(error):
            raise
        return Verdict(_UNLIKE)  # where the default runs, and this does not, it is of no use
    gaps = [_difference(made[value], expected[value]) for value in made]
    return Verdict(_UNLIKE if _UNLIKE in gaps else max(gaps, default=0.0))


def _hashes(results: Mapping[ValueId, torch.Tensor]) -> dict[ValueId, Any]:
    """Return a small value that tells results apart."""
    return {
        value: (x.shape, x.dtype, x.stride(), hashlib.sha256(_bits(x).cpu().numpy()).digest())
        for value, x in results.items()
    }


def _difference(made: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference as a `Verdict` has it."""
    if (made.shape, made.dtype, made.stride()) != (
        expected.shape,
        expected.dtype,
        expected.stride(),
    ):
        return _UNLIKE
    if torch.equal(_bits(made), _bits(expected)):
        return 0.0
    exact = expected.to(torch.float64)
    gap = (made.to(torch.float64) - exact).abs().max().item()
    largest = exact.abs().max().item()
    usable = math.isfinite(gap) and 0 < largest < math.inf
    return max(gap, sys.float_info.min) / largest if usable else _UNLIKE


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of each number as an integer, by which they are soon compared."""
    flat = tensor.contiguous().view(-1)
    return flat.view(_INTEGERS.get(tensor.itemsize, torch.uint8))
