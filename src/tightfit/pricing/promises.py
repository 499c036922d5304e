"""Alternatives that do not keep their promise are left out: each is run beside the default.

On the step's own device, on drawn tensors: what calls itself ``"bitwise"`` has every bit of the
default, and ``"rounding"`` is near it. Verdicts are kept on disk, like costs. Where there is little
room, one result is kept as a hash of its bits while the other is made.
"""

from __future__ import annotations

import functools
import hashlib
import math
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import fx

from tightfit.allocator.tally import if_room, is_refusal
from tightfit.capture.captured import Call, Captured
from tightfit.capture.nodes import flat_outputs, storage_bytes
from tightfit.costs.cache import Cache
from tightfit.costs.measured.call import SHORT_S, environment_of
from tightfit.graph.ir import Alternative, Exactness, ValueId
from tightfit.pricing.fewer_rows import FewerRows, rows_of, shortened
from tightfit.pricing.records import DOES_NOT_RUN, Brief, device_of, keep, key_of, name_of
from tightfit.pricing.trial import Results, Trial
from tightfit.progress import Progress
from tightfit.torch_private import core as private

__all__ = ["TOLERANCES", "Kept", "keeping_promises", "promises_kept"]

aten = torch.ops.aten

TOLERANCES: Mapping[torch.dtype, float] = {
    torch.float64: 1e-12,
    torch.float32: 3e-5,
    torch.float16: 1e-2,
    torch.bfloat16: 6e-2,
}
"""What ``"rounding"`` means: the largest difference as a share of the default's largest number."""

_ELEMENTWISE = (  # as PyTorch's own tag says of others
    aten.hardtanh_backward.default,
    aten.leaky_relu_backward.default,
    aten.elu_backward.default,
)
_TYPICAL_BYTES = 4 << 20  # what a comparison of an elementwise operator takes
_UNLIKE = -1.0
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a number


class Verdict(msgspec.Struct, frozen=True):
    """How an alternative compared.

    Parameters
    ----------
    difference : float
        The largest as a share of the default's largest number; 0: every bit is equal; -1: the
        result has another shape, type or layout, or nothing can be said of it.
    """

    difference: float


@dataclass(frozen=True)
class _Claim:
    """What an alternative says of itself.

    Parameters
    ----------
    default, call : Call
        What is compared.
    exactness : str
        What is claimed.
    key, kind : str
        Equal for comparisons that come out alike, and for those that differ in sizes only.
    made_bytes : int
        Bytes of its results.
    """

    default: Call
    call: Call
    exactness: Exactness
    key: str
    kind: str
    made_bytes: int

    @property
    def holds_for_more_rows(self) -> bool:
        """Whether it comes out alike at any size, or with any number of rows."""
        return self.kind != self.key


@dataclass(frozen=True)
class Kept:
    """A step whose alternatives are as exact as they say.

    Parameters
    ----------
    captured : Captured
        The step.
    on_rows : frozenset of int
        The `id` of each call that was compared on fewer rows only: no plan may use it in this room.
    """

    captured: Captured
    on_rows: frozenset[int]


def keeping_promises(captured: Captured, progress: Progress) -> Captured:
    """Return the step without the alternatives that are less exact than they say.

    Elementwise operators are compared once for each kind of arguments, others at every shape.

    Parameters
    ----------
    captured : Captured
        The step with alternatives.
    progress : Progress
        Told of each that is run.
    """
    return promises_kept(captured, progress).captured


def promises_kept(captured: Captured, progress: Progress, *, room_bytes: int | None = None) -> Kept:
    """Return the step as `keeping_promises` does, from comparisons that take a limited room.

    What there is no room to compare at its own size is compared on fewer rows of the batch. That is
    enough for an operator that treats each element or row by itself; with others that promise the
    same bits it only tells which larger budget to name. What does not run on fewer rows either is
    kept if it does not promise the same bits: where the logits of a language model have no room,
    neither has the default that their replacement would be compared with.

    Parameters
    ----------
    room_bytes : int, optional
        What a comparison may take.
    """
    claims = {
        (op.id, number): _claim(captured, calls[0], calls[number], way)
        for op, calls in zip(captured.graph.ops, captured.calls, strict=True)
        for number, way in enumerate(op.alternatives)
        if number and not _is_the_same(calls[0], calls[number])
    }
    if not claims:
        return Kept(captured, frozenset())
    comparisons = _Comparisons(captured, room_bytes)
    verdicts = comparisons.verdicts(claims.values(), progress)
    kept = {place for place, claim in claims.items() if _is_kept(claim, verdicts)}
    broken = {id(claims[place].call) for place in claims.keys() - kept}
    if broken:
        captured = captured.keeping(lambda op, way, call: id(call) not in broken)
    on_rows = {id(claims[place].call) for place in kept if claims[place].key in comparisons.on_rows}
    return Kept(captured, frozenset(on_rows))


def _is_the_same(default: Call, call: Call) -> bool:
    """Whether an alternative runs just what the default runs, only at another time."""
    return call.function is default.function and call.args == default.args


def _claim(captured: Captured, default: Call, call: Call, way: Alternative) -> _Claim:
    key = "\n".join((key_of(default), key_of(call), _code(call.function)))
    return _Claim(
        default,
        call,
        way.exactness,
        key,
        _kind(default, call, key, way.name),
        made_bytes=sum(captured.graph.values[v].size_bytes for v in way.writes),
    )


@functools.cache
def _code(function: Callable[..., Any]) -> str:
    """Return the code of the file that a function of ours lies in: with another one, ask again."""
    file = getattr(sys.modules.get(function.__module__), "__file__", None)
    ours = isinstance(function, types.FunctionType) and file is not None
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if ours and file else ""


def _kind(default: Call, call: Call, key: str, name: str) -> str:
    """Return a text that is equal for comparisons of elementwise ops at any size."""
    if call.stretches:
        return " ".join((name, call.stretches, *_layouts(default, call)))
    functions = name_of(default.function), name_of(call.function)
    if call.by_rows:
        return " ".join((name, *functions, *_layouts(default, call), *_by_rows(default, call)))
    if not isinstance(call.function, private.OpOverload):
        return key
    tags = getattr(default.function, "tags", ())
    if torch.Tag.pointwise not in tags and default.function not in _ELEMENTWISE:
        return key
    return " ".join((name, *functions, *_layouts(default, call)))


def _layouts(*calls: Call) -> list[str]:
    return [
        _layout(x) if isinstance(x, torch.Tensor) else type(x).__name__ for x in _leaves(*calls)
    ]


def _by_rows(*calls: Call) -> list[str]:
    """Return what one row of each tensor is, and what there is beside tensors."""
    rows = [str(tuple(x.shape[1:])) for x in _leaves(*calls) if isinstance(x, torch.Tensor)]
    return rows + [str(fx.map_arg((call.args, call.kwargs), lambda node: None)) for call in calls]


def _leaves(*calls: Call) -> list[Any]:
    return [x for call in calls for n in call.nodes() for x in flat_outputs(n)]


def _layout(tensor: torch.Tensor) -> str:
    dimensions = [d for d, size in enumerate(tensor.shape) if size > 1]
    order = sorted(dimensions, key=tensor.stride)
    return f"{tensor.dtype} {tensor.dim()} {order == sorted(order, reverse=True)}"


def _is_kept(claim: _Claim, verdicts: Mapping[str, Verdict]) -> bool:
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


@dataclass(frozen=True)
class _Beside:
    """What a default made of drawn tensors.

    Parameters
    ----------
    default : Call
        That ran.
    trial : Trial
        Has the tensors.
    expected : dict of int to Tensor
        What it made.
    """

    default: Call
    trial: Trial
    expected: Results


class _Comparisons:
    """Runs alternatives of a step beside their defaults.

    Attributes
    ----------
    on_rows : set of str
        The keys of claims of the same bits that were compared on fewer rows and not elementwise.
    """

    def __init__(self, captured: Captured, room_bytes: int | None) -> None:
        self._captured = captured
        self._room_bytes = room_bytes
        self._default = {n: c[0] for n, c in zip(captured.nodes, captured.calls, strict=True)}
        self._device = device_of(captured)
        self._cache = Cache(environment_of(self._device))
        self._beside: _Beside | None = None
        self.on_rows: set[str] = set()

    def verdicts(self, claims: Iterable[_Claim], progress: Progress) -> dict[str, Verdict]:
        """Return verdicts by keys and by kinds; without one: there was no room for it."""
        cache = self._cache
        found: dict[str, Verdict] = {}
        missing = list(self._representatives(claims))
        progress.start("comparing alternatives", len(missing))
        try:
            for done, claim in enumerate(missing):
                progress.update(done, name_of(claim.call.function))
                name = f"{Verdict.__name__}\n{claim.key}"
                verdict = cache.get(name, Verdict)
                if verdict is None and (verdict := if_room(partial(self._compared, claim))):
                    cache.put(name, verdict)
                verdict = verdict or if_room(partial(self._compared_on_rows, claim))
                if verdict is not None:
                    found[claim.key] = found[claim.kind] = verdict
        finally:
            self._beside = None
            cache.save()
            progress.stop()
        return found

    def _representatives(self, claims: Iterable[_Claim]) -> Iterable[_Claim]:
        """Return one claim of each kind: one that has room, and is neither large nor small."""
        alike: dict[str, list[_Claim]] = defaultdict(list)
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

    def _arguments(self, claim: _Claim) -> set[fx.Node]:
        nodes = {*claim.default.nodes(), *claim.call.nodes()}
        for node in claim.call.rests_on:
            nodes |= {node, *self._default[node].nodes()}
        return nodes

    def _argument_bytes(self, claim: _Claim) -> int:
        return sum(storage_bytes(x) for n in self._arguments(claim) for x in flat_outputs(n))

    def _compared(self, claim: _Claim) -> Verdict | None:
        """Compare two results side by side, or if that is too much one after the other."""
        argument_bytes = self._argument_bytes(claim)
        if self._has(3 * argument_bytes):
            verdict = if_room(partial(self._compared_side_by_side, claim))
            if verdict is not None:
                return verdict
        self._beside = None
        if not self._has(argument_bytes + claim.made_bytes):
            return None
        expected, made = (  # each may write over what it is given
            _hashes(self._trial(claim, copies=False).results(call))
            for call in (claim.default, claim.call)
        )
        if made.items() <= expected.items():
            return Verdict(0.0)
        return Verdict(_UNLIKE) if claim.exactness == "bitwise" else None

    def _compared_side_by_side(self, claim: _Claim) -> Verdict:
        """Compare two results; those of a default serve all alternatives of an op."""
        beside, self._beside = self._beside, None
        trial = self._trial(claim)
        if beside is None or beside.default is not claim.default or not trial.is_drawn:
            beside = _Beside(claim.default, trial, self._results(trial, claim.default))
        if beside.trial.is_drawn:
            self._beside = beside
        results = partial(self._results, beside.trial)
        return _verdict(beside.expected, partial(results, claim.call))

    def _results(self, trial: Trial, call: Call) -> Results:
        """Run a call; what it takes is kept, and need not be found out another time."""
        if self._device.type != "cpu" or not trial.is_drawn:
            return trial.results(call)
        results, taken = trial.metered(call, self._device)
        if taken.cost_s >= SHORT_S:
            keep(self._cache, key_of(call), Brief.of(taken))
        return results

    def _trial(self, claim: _Claim, *, copies: bool = True) -> Trial:
        call = claim.call
        return Trial(
            self._captured, self._default, call.rests_on, condition=call.condition, copies=copies
        )

    def _compared_on_rows(self, claim: _Claim) -> Verdict | None:
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
        verdict = next((one for one in verdicts if one is not None and one.difference >= 0), None)
        if verdict is None:
            return None
        if claim.exactness == "bitwise" and not claim.holds_for_more_rows:
            self.on_rows.add(claim.key)
        return verdict

    def _verdict_on(self, few: FewerRows, claim: _Claim) -> Verdict | None:
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
    """Return what tells results apart, and is small."""
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
