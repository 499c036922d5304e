"""Alternatives that do not keep their promise are left out: each is run beside the default.

On the step's own device, on drawn tensors: what calls itself ``"bitwise"`` has every bit of the
default, and ``"rounding"`` is near it. Verdicts are kept on disk, like costs.
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

from tightfit.allocator.tally import if_room
from tightfit.capture.captured import Call, Captured
from tightfit.capture.nodes import flat_outputs, storage_bytes
from tightfit.costs.cache import Cache
from tightfit.costs.measured.call import environment_of
from tightfit.graph.ir import Alternative, Exactness
from tightfit.pricing.records import device_of, key_of, name_of
from tightfit.pricing.trial import Trial
from tightfit.progress import Progress
from tightfit.torch_private import core as private

__all__ = ["TOLERANCES", "keeping_promises"]

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
    """

    default: Call
    call: Call
    exactness: Exactness
    key: str
    kind: str


def keeping_promises(
    captured: Captured, progress: Progress, *, room_bytes: int | None = None
) -> Captured:
    """Return the step without the alternatives that are less exact than they say.

    Elementwise operators are compared once for each kind of arguments, others at every shape.
    One that there is no room to compare is kept if another of its kind kept its promise, or if it
    does not promise the same bits: where the logits of a language model have no room, neither has
    the default that their replacement would be compared with.

    Parameters
    ----------
    captured : Captured
        The step with alternatives.
    progress : Progress
        Told of each that is run.
    room_bytes : int, optional
        What a comparison may take.
    """
    claims = {
        (op.id, number): _claim(calls[0], calls[number], way)
        for op, calls in zip(captured.graph.ops, captured.calls, strict=True)
        for number, way in enumerate(op.alternatives)
        if number and not _is_the_same(calls[0], calls[number])
    }
    if not claims:
        return captured
    verdicts = _Comparisons(captured, room_bytes).verdicts(claims.values(), progress)
    kept = {place for place, claim in claims.items() if _is_kept(claim, verdicts)}
    broken = {id(claims[place].call) for place in claims.keys() - kept}
    return captured.keeping(lambda op, way, call: id(call) not in broken) if broken else captured


def _is_the_same(default: Call, call: Call) -> bool:
    """Whether an alternative runs just what the default runs, only at another time."""
    return call.function is default.function and call.args == default.args


def _claim(default: Call, call: Call, way: Alternative) -> _Claim:
    key = "\n".join((key_of(default), key_of(call), _code(call.function)))
    return _Claim(default, call, way.exactness, key, _kind(default, call, key, way.name))


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
    if not isinstance(call.function, private.OpOverload):
        return key
    tags = getattr(default.function, "tags", ())
    if torch.Tag.pointwise not in tags and default.function not in _ELEMENTWISE:
        return key
    functions = name_of(default.function), name_of(call.function)
    return " ".join((name, *functions, *_layouts(default, call)))


def _layouts(*calls: Call) -> list[str]:
    leaves = [x for call in calls for n in call.nodes() for x in flat_outputs(n)]
    return [_layout(x) if isinstance(x, torch.Tensor) else type(x).__name__ for x in leaves]


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


class _Comparisons:
    """Runs alternatives of a step beside their defaults."""

    def __init__(self, captured: Captured, room_bytes: int | None) -> None:
        self._captured = captured
        self._room_bytes = room_bytes
        self._default = {n: c[0] for n, c in zip(captured.nodes, captured.calls, strict=True)}
        self._device = device_of(captured)

    def verdicts(self, claims: Iterable[_Claim], progress: Progress) -> dict[str, Verdict]:
        """Return verdicts by keys and by kinds; without one: there was no room for it."""
        cache = Cache(environment_of(self._device))
        found: dict[str, Verdict] = {}
        missing = list(self._representatives(claims))
        progress.start("comparing alternatives", len(missing))
        try:
            for done, claim in enumerate(missing):
                progress.update(done, name_of(claim.call.function))
                name = f"{Verdict.__name__}\n{claim.key}"
                verdict = cache.get(name, Verdict) or if_room(partial(self._compared, claim))
                if verdict is not None:  # else it takes more than was thought
                    cache.put(name, verdict)
                    found[claim.key] = found[claim.kind] = verdict
        finally:
            cache.save()
            progress.stop()
        return found

    def _representatives(self, claims: Iterable[_Claim]) -> Iterable[_Claim]:
        """Return one claim of each kind: the largest that has room."""
        alike: dict[str, list[tuple[int, _Claim]]] = defaultdict(list)
        for claim in claims:
            size = self._size(claim)
            if self._room_bytes is None or size <= self._room_bytes:
                alike[claim.kind].append((size, claim))
        for sized in alike.values():
            yield min(sized, key=lambda pair: abs(pair[0] - _TYPICAL_BYTES))[1]

    def _size(self, claim: _Claim) -> int:
        """Return about what a comparison takes: all arguments, and three times the results."""
        nodes = {*claim.default.nodes(), *claim.call.nodes()}
        for node in claim.call.rests_on:
            nodes |= {node, *self._default[node].nodes()}
        return 3 * sum(storage_bytes(x) for n in nodes for x in flat_outputs(n))

    def _compared(self, claim: _Claim) -> Verdict:
        trial = Trial(self._captured, self._default, claim.call.rests_on)
        expected = trial.results(claim.default)
        made = trial.results(claim.call)
        gaps = [_difference(made[value], expected[value]) for value in made]
        return Verdict(_UNLIKE if _UNLIKE in gaps else max(gaps, default=0.0))


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
    return tensor.contiguous().view(-1).view(torch.uint8)
