"""Measuring one call on given inputs: its time, its workspace, its outputs.

Knows neither capture nor alternatives: a function and its arguments go in.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from tightfit.allocator import measure_peak
from tightfit.allocator.devices import fixed_generators, seconds_of
from tightfit.allocator.refusals import unless_refused
from tightfit.allocator.resident import granularity_of, resident_tensor_bytes
from tightfit.torch_private import core as private

_FORMAT = 2
_FLUSHED_BYTES = 16 << 20
_CALM_RATIO = 1.2
_CALM_S = 20e-6
_FEWEST_REPEATS = 3
_MOST_REPEATS = 9
_DRAWN = 65_521  # random numbers of synthetic contents; a prime: rows differ
_ZERO_EVERY = 7  # so many drawn numbers are zero: there ways of computing differ first
_SHORT_RUNS = 3
_MOST_DISTURBED = 3  # runs of a call in each of which another thread took or freed memory

SHORT_S = 2e-3
"""A call that takes less runs several times to be measured."""


class Footprint(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one call and the memory it needs only while it runs."""

    # The most live bytes during the call beyond those before it and its outputs
    workspace_bytes: int
    # For each output its storage's size, not rounded; 0 for None and for empty tensors
    output_bytes: tuple[int, ...]
    # For each output its strides; None if it is no tensor
    output_strides: tuple[tuple[int, ...] | None, ...]
    # For each output the position, among the tensor arguments, of the argument whose storage it
    # shares; -1: its own storage
    aliases: tuple[int, ...]
    none_outputs: tuple[int, ...]  # positions of the outputs that are no tensors
    # For each output its type and its device, as `kind_of` says it; None if it is no tensor. ():
    # not known.
    output_kinds: tuple[str | None, ...] = ()


def kind_of(tensor: torch.Tensor) -> str:
    """Return the type of a tensor's numbers and of its device."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tensor.device.type}"


class Measurement(Footprint, frozen=True, kw_only=True):
    """A footprint, and the cost of the call."""

    cost_s: float  # median time in seconds: CPU time on a CPU, device time on a GPU
    # On a GPU the time of the processor until the call is on its way; 0 on a CPU
    launch_s: float = 0.0


def measure_call(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    keyword_arguments: Mapping[str, Any] | None = None,
    *,
    device: torch.device | str,
    seconds: float = 0.12,
) -> Measurement:
    """Run a call several times and return its cost.

    Before each timed run the caches are filled with something else: in a step the inputs of an
    op are rarely all in cache. Runs that were preempted (wall time above 1.2 times CPU time) are
    repeated. A call that takes longer than `seconds` is timed once, while its peak is metered.
    Random numbers drawn by the call do not move the global generators.

    `function`: takes tensors, returns a tensor, None, or a tuple or list of both. `arguments`,
    `keyword_arguments`: real tensors on `device` (see `materialise`) and plain values. `seconds`:
    time after which two undisturbed runs suffice; about the duration of the measurement.
    """
    device = torch.device(device)
    keywords = dict(keyword_arguments or {})

    def call() -> Any:
        return function(*arguments, **keywords)

    with torch.no_grad(), fixed_generators(device):
        warm = call()
        outputs, once = metered_run(function, arguments, keywords, device=device)
        cost, launch = once.cost_s, 0.0
        del warm  # timed runs take its place; the outputs above it keep the heap from shrinking
        if device.type == "cuda":
            cost, launch = _time_on_gpu(call, device, seconds)
        elif cost < seconds:
            cost = _time(call, seconds)
        del outputs
    return msgspec.structs.replace(once, cost_s=cost, launch_s=launch)


def measure_workspace(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    keyword_arguments: Mapping[str, Any],
    *,
    device: torch.device | str,
) -> Footprint:
    """Run a call twice and return time and bytes of the second run; see `measure_call`."""
    device = torch.device(device)
    with torch.no_grad(), fixed_generators(device):
        warm = function(*arguments, **keyword_arguments)
        del warm
        taken = metered_run(function, arguments, keyword_arguments, device=device)[1]
    return Footprint(**{name: getattr(taken, name) for name in Footprint.__struct_fields__})


def measure_once(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    keyword_arguments: Mapping[str, Any],
    *,
    device: torch.device | str,
) -> Measurement:
    """Run a call and return its bytes, and roughly its time.

    A short one runs three times, as the first run of a kernel sets things up, and the most bytes
    count. Threads that race may need a few more in one run than in another. See `measure_call`.
    """
    device = torch.device(device)
    runs: list[Measurement] = []
    with torch.no_grad(), fixed_generators(device):
        while len(runs) < _SHORT_RUNS and not any(run.cost_s >= SHORT_S for run in runs):
            runs.append(metered_run(function, arguments, keyword_arguments, device=device)[1])
        cost, launch = min(run.cost_s for run in runs), 0.0
        if device.type == "cuda":
            cost, launch = _time_on_gpu(
                lambda: function(*arguments, **keyword_arguments), device, 0.0
            )
    most = max(runs, key=lambda run: run.workspace_bytes)
    return msgspec.structs.replace(most, cost_s=cost, launch_s=launch)


def metered_run(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    keyword_arguments: Mapping[str, Any],
    *,
    device: torch.device,
) -> tuple[Any, Measurement]:
    """Run a call once; return its result, and its bytes with the time of the processor.

    The time of a call of less than `SHORT_S` says little: its first run sets things up. Where more
    or less is held afterwards than its results, another thread has asked for memory or freed some
    meanwhile. Then the call runs again, unless it writes its arguments or does so each time.
    """
    before_bytes = None
    for _ in range(_MOST_DISTURBED):
        outputs, run, growth_bytes = _run(function, arguments, keyword_arguments, device)
        repeats = not any(alias >= 0 for alias in run.aliases) and growth_bytes != before_bytes
        if not repeats or device.type != "cpu" or _is_made(outputs, growth_bytes, device.type):
            return outputs, run
        del outputs  # else the outputs of two runs would be held at once
        before_bytes = growth_bytes
    return _run(function, arguments, keyword_arguments, device)[:2]


def _run(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    device: torch.device,
) -> tuple[Any, Measurement, int]:
    """Run a call; return its result, its time and bytes, and how much more is held after it."""
    clock = _clock()
    begin = clock()
    outputs, peak = measure_peak(lambda: function(*arguments, **keywords), device=device)
    cost = clock() - begin
    taken = max(0, peak.peak_bytes - peak.growth_bytes)
    shape = _describe(outputs, arguments, keywords)
    return outputs, Measurement(cost_s=cost, workspace_bytes=taken, **shape), peak.growth_bytes


def _is_made(outputs: Any, growth_bytes: int, kind: str) -> bool:
    """Whether as much came as some outputs take, their storages rounded or not."""
    flat = outputs if isinstance(outputs, tuple | list) else (outputs,)
    least, most = (resident_tensor_bytes(flat, size) for size in (1, granularity_of(kind)))
    return least <= growth_bytes <= most


def _describe(
    outputs: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> dict[str, Any]:
    storages = [
        leaf.untyped_storage().data_ptr() if leaf.numel() else None
        for leaf in private.pytree.tree_leaves((arguments, keywords))
        if isinstance(leaf, torch.Tensor)
    ]
    flat = outputs if isinstance(outputs, tuple | list) else (outputs,)
    sizes, strides, aliases = [], [], []
    for output in flat:
        is_tensor = isinstance(output, torch.Tensor)
        holds = is_tensor and output.numel() > 0 and private.has_memory(output)
        pointer = output.untyped_storage().data_ptr() if holds else None
        sizes.append(output.untyped_storage().nbytes() if holds else 0)
        strides.append(tuple(output.stride()) if is_tensor else None)
        aliases.append(storages.index(pointer) if holds and pointer in storages else -1)
    return {
        "output_bytes": tuple(sizes),
        "output_strides": tuple(strides),
        "aliases": tuple(aliases),
        "none_outputs": tuple(i for i, s in enumerate(strides) if s is None),
        "output_kinds": tuple(kind_of(x) if isinstance(x, torch.Tensor) else None for x in flat),
    }


def _clock() -> Callable[[], float]:
    """Return a clock of CPU time: of this thread if torch uses one, else of the process."""
    return time.thread_time if torch.get_num_threads() == 1 else time.process_time


def _time(call: Callable[[], Any], seconds: float) -> float:
    """Return the median CPU time."""
    clock = _clock()
    filler = _filler()
    calm: list[float] = []
    disturbed: list[float] = []
    begin = time.perf_counter()
    while True:
        filler.sum()
        wall, cpu = time.perf_counter(), clock()
        result = call()
        cpu, wall = clock() - cpu, time.perf_counter() - wall
        del result
        (calm if wall <= _CALM_RATIO * cpu + _CALM_S else disturbed).append(cpu)
        spent = time.perf_counter() - begin
        if len(calm) >= _MOST_REPEATS or len(calm) + len(disturbed) >= 3 * _MOST_REPEATS:
            break
        if spent > seconds and len(calm) >= _FEWEST_REPEATS - (spent > 2 * seconds):
            break
        if spent > 4 * seconds and calm:
            break
    return statistics.median(calm or disturbed)


def _filler() -> torch.Tensor:
    """Return a tensor to read to empty caches; almost empty where a limit has no room."""
    filler = unless_refused(lambda: torch.zeros(_FLUSHED_BYTES // 8, dtype=torch.int64))
    return filler if filler is not None else torch.zeros(1, dtype=torch.int64)


def _time_on_gpu(
    call: Callable[[], Any], device: torch.device, seconds: float
) -> tuple[float, float]:
    """Return the median device time between CUDA events, and the processor's until it is asked."""
    filler = torch.empty(4 * _FLUSHED_BYTES, dtype=torch.uint8, device=device)
    samples: list[float] = []
    launches: list[float] = []

    def launch() -> None:
        launched = time.perf_counter()
        call()
        launches.append(time.perf_counter() - launched)

    begin = time.perf_counter()
    while len(samples) < _FEWEST_REPEATS or (
        len(samples) < _MOST_REPEATS and time.perf_counter() - begin < seconds
    ):
        filler.zero_()
        samples.append(seconds_of(launch, device))
    return statistics.median(samples), statistics.median(launches)


def materialise(
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    storage_bytes: int = 0,
) -> torch.Tensor:
    """Return a tensor of given layout with contents that every operator accepts.

    Floats are between 0.05 and 0.15 (safe as variances, divisors, arguments of logarithms),
    booleans are true half of the time, integers are zero. Strides may be 0 (expanded) or overlap;
    a view may have a storage of at least `storage_bytes`. The global random generators do not move.
    """
    reached = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    elements = max(0 if 0 in shape else reached, storage_bytes // dtype.itemsize)
    device = torch.device(device)
    generator = torch.Generator(device).manual_seed(0)
    if dtype.is_floating_point or dtype.is_complex:
        drawn = torch.empty(min(elements, _DRAWN), dtype=torch.float32, device=device)
        drawn = drawn.uniform_(0.05, 0.15, generator=generator).to(dtype)
        flat = drawn if elements <= len(drawn) else _repeat(drawn, drawn.new_empty(elements))
    elif dtype == torch.bool:
        flat = torch.rand(elements, generator=generator, device=device) < 0.5
    else:
        flat = torch.zeros(elements, dtype=dtype, device=device)
    return flat.as_strided(tuple(shape), tuple(strides))


def _repeat(drawn: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """Fill a flat tensor with some numbers over and over: drawing takes longer than copying."""
    whole = len(flat) - len(flat) % len(drawn)
    flat[:whole].view(-1, len(drawn)).copy_(drawn)
    flat[whole:].copy_(drawn[: len(flat) - whole])
    return flat


def draw_normal(flat: torch.Tensor, *, seed: int) -> None:
    """Fill a flat tensor with numbers of both signs; the global generators do not move."""
    generator = torch.Generator(flat.device).manual_seed(seed)
    drawn = torch.randn(min(len(flat), _DRAWN), generator=generator, device=flat.device)
    drawn[_ZERO_EVERY - 1 :: _ZERO_EVERY] = 0
    if len(flat):
        _repeat(drawn, flat)


def call_key(
    name: str, arguments: Sequence[Any], keyword_arguments: Mapping[str, Any] | None = None
) -> str:
    """Return a text that is equal for calls that cost the same.

    Tensors (real or fake) enter by shape, strides (or another layout), dtype and, where they are
    part of a storage, its size. Everything else enters by its text; nesting counts, too.
    """
    leaves, structure = private.pytree.tree_flatten(
        (list(arguments), dict(keyword_arguments or {}))
    )
    texts = [_text(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves]
    return "\n".join([name, str(structure), *texts])


def _text(tensor: torch.Tensor) -> str:
    if tensor.layout != torch.strided:
        return f"{tuple(tensor.shape)}{tensor.layout}{tensor.dtype}"
    whole = tensor.untyped_storage().nbytes()
    part = "" if whole == tensor.numel() * tensor.itemsize else f" of {whole}"
    return f"{tuple(tensor.shape)}{tuple(tensor.stride())}{tensor.dtype}{part}"


def environment_of(device: torch.device | str) -> str:
    """Return conditions of measurements: device, threads, versions, settings."""
    device = torch.device(device)
    facts = [
        f"format {_FORMAT}",
        f"torch {torch.__version__}",
        *(f"{name} {precision}" for name, precision in _float32_precisions().items()),
        f"deterministic {torch.are_deterministic_algorithms_enabled()}",
    ]
    if device.type == "cuda":
        facts += [
            torch.cuda.get_device_name(device),
            f"cudnn {torch.backends.cudnn.version()}",
            f"benchmark {torch.backends.cudnn.benchmark}",
        ]
    else:
        facts += [
            cpu_name(),
            torch.backends.cpu.get_cpu_capability(),
            f"threads {torch.get_num_threads()}",
            f"oneDNN {torch.backends.mkldnn.enabled}",
        ]
    return ", ".join(facts)


def _float32_precisions() -> dict[str, str]:
    """Return how precisely each kind of kernel computes in single precision.

    The older settings (`allow_tf32`, the matmul precision) are not asked for: they raise once
    one of these is set.
    """
    backends = torch.backends
    kinds = {
        "cuda.matmul": backends.cuda.matmul,
        "cudnn.conv": backends.cudnn.conv,
        "cudnn.rnn": backends.cudnn.rnn,
        "mkldnn.matmul": backends.mkldnn.matmul,
        "mkldnn.conv": backends.mkldnn.conv,
        "mkldnn.rnn": backends.mkldnn.rnn,
    }
    return {name: kind.fp32_precision for name, kind in kinds.items()}


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
