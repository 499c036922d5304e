"""Measured calls: exact bytes, aliases and layouts; times that are positive and robust."""

from __future__ import annotations

import time

import pytest
import torch

from tightfit.costs.measured import call as measured
from tightfit.costs.measured.call import call_key, environment_of, materialise, measure_call

aten = torch.ops.aten
KIB = 1024


def measure(function, *arguments, **keywords):
    return measure_call(function, arguments, keywords, device="cpu", seconds=0.02)


def test_a_plain_operator():
    x = torch.ones(100, 1000)
    result = measure(aten.add.Tensor, x, x, alpha=2)
    assert result.output_bytes == (400_000,)
    assert result.output_strides == ((1000, 1),)
    assert result.aliases == (-1,)
    assert result.none_outputs == ()
    assert result.workspace_bytes == 0
    assert 1e-6 < result.cost_s < 1


def test_workspace_is_the_peak_without_the_outputs():
    def negated_twice(x: torch.Tensor) -> torch.Tensor:
        return x.neg().neg()

    result = measure(negated_twice, torch.ones(64, KIB))
    assert result.workspace_bytes == 256 * KIB
    assert result.output_bytes == (256 * KIB,)


def test_what_another_thread_frees_or_takes_meanwhile_is_no_workspace():
    held = [torch.ones(64, KIB) for _ in range(3)]
    taken = [held.pop]  # what the runs do besides their work: the first one is not measured
    taken += [held.pop, lambda: held.append(torch.ones(64, KIB))]

    def negated(x: torch.Tensor) -> torch.Tensor:
        if taken:
            taken.pop(0)()
        return x.neg()

    result = measure(negated, torch.ones(64, KIB))
    assert result.workspace_bytes == 0
    assert not taken


def test_outputs_that_are_missing_or_share_memory():
    x, weight = torch.ones(2, 3, 16, 16), torch.ones(8, 3, 3, 3)
    gradient = torch.ones(2, 8, 14, 14)
    settings = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, True])
    result = measure(aten.convolution_backward.default, gradient, x, weight, [8], *settings)
    assert result.none_outputs == (0,)
    assert result.output_bytes[1:] == (8 * 27 * 4, 8 * 4)
    assert result.aliases == (-1, -1, -1)

    view = measure(aten.view.default, x, [2, -1])
    assert view.aliases == (0,)
    in_place = measure(torch.Tensor.add_, torch.ones(4), x.view(-1)[:4])
    assert in_place.aliases == (0,)
    assert in_place.workspace_bytes == 0


def test_measuring_random_operators_leaves_the_generator_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    measure(aten.native_dropout.default, torch.ones(KIB), 0.5, True)
    materialise((4,), (1,), torch.float32, "cpu")
    assert torch.equal(torch.get_rng_state(), before)


def test_preempted_runs_are_repeated(monkeypatch):
    """Runs whose wall time is far above their CPU time do not enter the median."""
    busy = iter([0.05, 0.05] + [0.0] * 100)
    monkeypatch.setattr(measured.torch, "get_num_threads", lambda: 1)

    def sometimes_preempted() -> None:
        begin = time.thread_time()
        while time.thread_time() - begin < 0.002:
            pass
        delay = next(busy)
        if delay:
            while time.thread_time() - begin < 0.01:
                pass
            time.sleep(delay)

    assert 0.002 <= measured._time(sometimes_preempted, 0.02) < 0.004


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_floating_contents_are_positive_and_small(dtype):
    tensor = materialise((3, 4), (4, 1), dtype, "cpu")
    assert tensor.dtype == dtype
    real = tensor.real if dtype.is_complex else tensor
    assert bool((real >= 0.04).all() and (real <= 0.16).all())


def test_layouts_are_kept():
    channels_last = materialise((2, 3, 4, 5), (60, 1, 15, 3), torch.float32, "cpu")
    assert channels_last.is_contiguous(memory_format=torch.channels_last)
    expanded = materialise((8, 1000), (0, 1), torch.float32, "cpu")
    assert expanded.stride() == (0, 1)
    assert expanded.untyped_storage().nbytes() == 4000
    assert materialise((0, 7), (7, 1), torch.float32, "cpu").shape == (0, 7)
    assert materialise((), (), torch.int64, "cpu").item() == 0


def test_integers_are_valid_indices():
    assert materialise((5,), (1,), torch.int32, "cpu").tolist() == [0] * 5
    flags = materialise((1000,), (1,), torch.bool, "cpu")
    assert 300 < int(flags.sum()) < 700


def test_keys_tell_calls_apart():
    x = torch.empty(2, 3)
    base = call_key("aten.add", (x, 1), {"alpha": 2})
    assert base == call_key("aten.add", (torch.ones(2, 3), 1), {"alpha": 2})
    others = [
        call_key("aten.sub", (x, 1), {"alpha": 2}),
        call_key("aten.add", (x, 1), {"alpha": 3}),
        call_key("aten.add", (x, 1.0), {"alpha": 2}),
        call_key("aten.add", (x.t().contiguous().t(), 1), {"alpha": 2}),
        call_key("aten.add", (x.double(), 1), {"alpha": 2}),
        call_key("aten.add", ([x], 1), {"alpha": 2}),
        call_key("aten.add", (x, x), {"alpha": 2}),
    ]
    assert len({base, *others}) == len(others) + 1


def test_the_environment_names_what_times_depend_on():
    here = environment_of("cpu")
    assert torch.__version__ in here
    assert f"threads {torch.get_num_threads()}" in here
