"""Plain PyTorch in a budget by eviction: the same bits, never more bytes, no wrong data."""

from __future__ import annotations

import copy
import functools
import gc
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tightfit
from benchmarks.online_models import PROGRAMS, Program, mlp
from support.evicting import EvictEverything
from support.gpu_stand_in import RoomOnStandIn, stand_in
from support.models import CASES, Case
from tightfit.allocator import CpuMeter
from tightfit.dynamic import region as region_module
from tightfit.dynamic.native.build import compiled_core
from tightfit.dynamic.native.compiling import CoreUnavailable
from tightfit.dynamic.room import RetryingRoom, allocated_bytes, storages_alive
from tightfit.errors import BadInput, BudgetExceeded, InfeasibleBudget
from tightfit.eviction.policies.registry import POLICIES

AMPLE = "1TiB"
KIB = 1 << 10


@pytest.fixture(params=["C++", "Python", "refused", "GPU"], autouse=True)
def core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let every region of a test have one core, then the other, then requests that are refused.

    "refused" is the way of a GPU, where nothing is called before a request is refused; "GPU" adds
    what PyTorch's limit of one says and counts.
    """
    if request.param in ("refused", "GPU"):
        room = RoomOnStandIn if request.param == "GPU" else RetryingRoom
        if request.param == "GPU":
            stand_in(monkeypatch)
        monkeypatch.setattr(region_module, "room_on", room)
        return request.param
    if request.param == "C++":
        try:
            compiled_core()
        except CoreUnavailable as error:
            if "the compiler refuse" in str(error):
                raise
            pytest.skip(str(error))
    monkeypatch.setattr(tightfit, "online", functools.partial(tightfit.online, core=request.param))
    return request.param


def bits(tensor: torch.Tensor) -> bytes:
    """Return the bits of a tensor, in memory that does not count."""
    return tensor.detach().numpy().tobytes()


def train(model: nn.Module, loss_of: Callable[[], torch.Tensor], steps: int) -> list[bytes]:
    """Train and return everything that must be equal."""
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    found: list[bytes] = []
    for _ in range(steps):
        loss = loss_of()
        loss.backward()
        found += [bits(loss), *(bits(p.grad) for p in model.parameters() if p.grad is not None)]
        del loss
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *map(bits, model.state_dict().values()), bits(torch.get_rng_state())]


def of_case(case: Case) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    torch.manual_seed(1)
    model, inputs = case.model(), case.inputs()

    def loss_of() -> torch.Tensor:
        with torch.autocast("cpu", enabled=case.autocast):
            return case.loss(model(*inputs)).float()

    return model, loss_of


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_every_bit_is_the_same_if_everything_is_evicted_always(case: Case) -> None:
    expected = train(*of_case(case), steps=1)
    model, loss_of = of_case(case)
    with tightfit.online(AMPLE, smallest=1, most_again=1e9) as region, EvictEverything(region):
        found = train(model, loss_of, steps=1)
    assert found == expected
    assert region.report().rematerialisations > 0


SHARES = {
    "resnet": 0.6,
    "lstm": 0.6,
    "treelstm": 0.7,
    "transformer": 0.4,
    "gan": 0.4,
    "jetmoe": 0.5,
    "superpoint": 0.8,
    "ttt": 0.5,
}
"""Programs, and a share of their activations that they run in."""


def activation_bytes(model: nn.Module, loss_of: Callable[[], torch.Tensor]) -> int:
    """Return the peak of the second step above what is there before it."""
    meter = CpuMeter()
    idle_bytes = 0
    for _ in range(2):
        model.zero_grad()
        gc.collect()
        meter.reset_peak()
        idle_bytes = meter.live_bytes()
        loss_of().backward()
    return meter.peak_bytes() - idle_bytes


def numbered(program: Program) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    model, loss_at = program
    steps = iter(range(100))
    return model, lambda: loss_at(next(steps))


def fresh(name: str) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    torch.manual_seed(2)
    return numbered(PROGRAMS[name]())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", SHARES)
def test_programs_of_all_kinds_keep_to_their_budget(name: str) -> None:
    if name == "jetmoe":
        pytest.importorskip("transformers")
    gc.collect()
    most_bytes = activation_bytes(*fresh(name))
    expected = train(*fresh(name), steps=3)
    gc.collect()
    model, loss_of = fresh(name)
    meter = CpuMeter()
    before_bytes = meter.live_bytes()
    momentum_bytes = sum(p.nbytes for p in model.parameters())
    share_bytes = momentum_bytes + int(SHARES[name] * most_bytes)
    with tightfit.online(share_bytes + resident_bytes(), most_again=100) as region:
        found = train(model, loss_of, steps=3)
        assert meter.peak_bytes() - before_bytes <= share_bytes
    assert found == expected
    assert region.report().rematerialisations > 0
    assert region.report().peak_bytes <= region.report().budget_bytes


def resident_bytes() -> int:
    """Return what counts against a budget before a region begins."""
    return sum(map(allocated_bytes, storages_alive()))


def chain(length: int, size: int = 4 * KIB) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the input and the result of many operators."""
    x = torch.ones(size // 4, requires_grad=True)
    y = x
    for _ in range(length):
        y = y * 1.0001
    return x, y


def test_chains_longer_than_pythons_stack_come_back_and_end() -> None:
    with tightfit.online(AMPLE, most_again=1e9) as region:
        x, y = chain(3000)
        region.evict(AMPLE)
        y.sum().backward()
    plain_x, plain_y = chain(3000)
    plain_y.sum().backward()
    assert torch.equal(y, plain_y) and torch.equal(x.grad, plain_x.grad)


@pytest.mark.parametrize("policy", [name for name in POLICIES if "cost=" not in name])
def test_every_policy_of_the_simulator_runs(policy: str) -> None:
    def small() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
        torch.manual_seed(2)
        return numbered(mlp(batch=256, width=64, depth=8))

    expected = train(*small(), steps=1)
    gc.collect()
    model, loss_of = small()
    with tightfit.online(resident_bytes() + 600_000, policy=policy, search="all") as region:
        assert train(model, loss_of, steps=1) == expected
    assert region.report().evictions > 0


# -- reading without the dispatcher ----------------------------------------------------------------


def saved(tensor: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file)


READERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "numpy": lambda t: torch.from_numpy(t.numpy()),
    "asarray": lambda t: torch.from_numpy(np.asarray(t)),
    "tolist": lambda t: torch.tensor(t.tolist()),
    "printing": lambda t: torch.ones(3) if "3., 3., 3." in repr(t) else None,
    "saving": saved,
    "deepcopy": copy.deepcopy,
    "dlpack": torch.from_dlpack,
    "indexing": lambda t: t[2:5].clone(),
    "item": lambda t: torch.tensor([t[0].item()]),
}


@pytest.mark.parametrize("name", READERS)
def test_whoever_reads_an_evicted_tensor_gets_its_values(name: str) -> None:
    with tightfit.online(AMPLE, smallest=1) as region:
        three = torch.ones(KIB) + 2
        region.evict(AMPLE)
        found = READERS[name](three)
        region.evict(AMPLE)
        assert bool((found == (1 if name == "printing" else 3)).all())


def test_memory_whose_address_was_handed_out_stays() -> None:
    with tightfit.online(AMPLE, smallest=1) as region:
        three = torch.ones(KIB) + 2
        array = three.numpy()
        address = three.data_ptr()
        region.evict(AMPLE)
        array[0] = 7
        assert three[0] == 7 and three.data_ptr() == address


def test_what_cannot_be_seen_is_an_error_and_not_wrong_data() -> None:
    with tightfit.online(AMPLE, smallest=1) as region:
        three = torch.ones(KIB) + 2
        region.evict(AMPLE)
        with pytest.raises(RuntimeError, match="data pointer"):
            torch._C._to_dlpack(three)
    assert bool((three == 3).all())


def test_an_empty_tensor_filled_out_of_sight_is_never_computed_again() -> None:
    with tightfit.online(AMPLE, smallest=1) as region:
        filled = torch.empty(KIB)
        filled.numpy()[:] = 5
        doubled = filled * 2
        filled[:3] = 1
        region.evict(AMPLE)
        assert bool((doubled == 10).all()) and filled.tolist() == [1] * 3 + [5] * (KIB - 3)


# -- what is written over --------------------------------------------------------------------------


def test_what_was_computed_from_a_tensor_outlives_its_change() -> None:
    small, large = torch.ones(8), torch.ones(4 * KIB)
    with tightfit.online(AMPLE, smallest=1) as region:
        from_small, from_large = small.repeat(4 * KIB) * 2, large.sum() * torch.ones(2)
        region.evict(AMPLE)
        small.zero_()  # a copy of it is kept
        large.zero_()  # what was computed comes back instead
        region.evict(AMPLE)
        assert bool((from_small == 2).all()) and from_large.tolist() == [4 * KIB] * 2


def test_what_ends_while_others_come_back_is_computed_once_more() -> None:
    with tightfit.online(AMPLE, smallest=1, policy="lru") as region:
        source = torch.ones(KIB) + 1
        first = source * 2
        torch.zeros(KIB)
        second = source * 3
        region.evict(AMPLE)  # first, source, second: only the first one keeps the source's storage
        del source
        assert bool((second + first == 10).all())  # it ends when the first one is there


def test_weights_changed_by_hand_and_gradients_added_up() -> None:
    def run(region: tightfit.Online | None) -> list[torch.Tensor]:
        torch.manual_seed(3)
        layer, found = nn.Linear(32, 32), []
        for _ in range(3):
            for _ in range(2):
                hidden = checkpoint(layer, torch.randn(16, 32), use_reentrant=False)
                loss = layer(hidden.relu()).square().mean()
                if region is not None:
                    region.evict(AMPLE)
                loss.backward()
            with torch.no_grad():
                for parameter in layer.parameters():
                    parameter.sub_(parameter.grad, alpha=0.1)
                    parameter.grad = None
            found += [loss.detach().clone(), *(p.detach().clone() for p in layer.parameters())]
        return found

    expected = run(None)
    with tightfit.online(AMPLE, smallest=1) as region:
        assert same(run(region), expected)


def test_sparse_gradients_and_sampled_indices() -> None:
    def run() -> list[torch.Tensor]:
        torch.manual_seed(3)
        words = nn.Embedding(50, 16, sparse=True)
        optimizer = torch.optim.SparseAdam(words.parameters())
        for _ in range(3):
            words(torch.randint(0, 50, (64,))).tanh().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [words.weight.detach().clone()]

    expected = run()
    with tightfit.online(AMPLE, smallest=1, most_again=1e9) as region, EvictEverything(region):
        assert same(run(), expected)


def test_what_was_computed_from_a_tensor_outlives_a_sparse_change() -> None:
    with tightfit.online(AMPLE, smallest=1) as region:
        given, made = torch.ones(8, 8), torch.ones(8, 8) * 2
        from_both = given * made * 3
        for tensor in (given, made):
            tensor.add_(torch.eye(8).to_sparse())
        region.evict(AMPLE)
        assert bool((from_both == 6).all()) and made.sum() == 136


def in_inference_mode() -> torch.Tensor:
    """Operators that are views or copies, as it happens, and that are not decomposed."""
    with torch.inference_mode():
        y = nn.functional.dropout(torch.randn(1, 64, 32), 0.5)
        y = nn.functional.scaled_dot_product_attention(y, y, y).transpose(1, 2).reshape(-1)
        return nn.functional.layer_norm(y, (2048,)).contiguous().clone()


def in_quanta() -> torch.Tensor:
    quantized = torch.quantize_per_tensor(torch.randn(64) * 2, 0.1, 0, torch.qint8)
    return quantized.dequantize() * quantized.int_repr()


def nested() -> torch.Tensor:
    tensors = torch.nested.nested_tensor([torch.randn(3, 8) + 1, torch.randn(5, 8)]) * 2
    return torch.cat(tensors.unbind())


@pytest.mark.filterwarnings("ignore")  # of prototypes
@pytest.mark.parametrize("run", [in_inference_mode, in_quanta, nested])
def test_tensors_of_other_kinds(run: Callable[[], torch.Tensor]) -> None:
    torch.manual_seed(3)
    expected = run()
    torch.manual_seed(3)
    with tightfit.online(AMPLE, smallest=1, most_again=1e9) as region, EvictEverything(region):
        assert torch.equal(run(), expected)


def test_memory_that_is_resized_keeps_its_readers() -> None:
    """As fully_shard does with weights that were gathered: freed after use, and filled again."""
    with tightfit.online(AMPLE, smallest=1) as region:
        gathered = torch.ones(KIB) * 3
        doubled = gathered * 2
        gathered.untyped_storage().resize_(0)
        region.evict(AMPLE)
        assert bool((doubled == 6).all())
        gathered.untyped_storage().resize_(4 * KIB)
        gathered.fill_(5)
        region.evict(AMPLE)
        assert bool((gathered == 5).all()) and bool((doubled == 6).all())


def test_a_model_made_inside_trains_alike() -> None:
    def run() -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            model(torch.randn(8, 16)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        return [tensor.detach().clone() for tensor in model.state_dict().values()]

    expected = run()
    with tightfit.online(AMPLE, smallest=1, most_again=1e9) as region, EvictEverything(region):
        assert same(run(), expected)


# -- what cannot be --------------------------------------------------------------------------------


def test_an_operator_that_does_not_fit_is_named_and_a_smaller_step_follows() -> None:
    torch.manual_seed(3)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    large, small = torch.randn(4096, 64), torch.randn(256, 64)
    with tightfit.online(resident_bytes() + 1_500_000) as region:
        with pytest.raises(BudgetExceeded, match=r"aten\.\w+.* needs 1\.00 MiB more") as error:
            model(large).relu().square().mean().backward()
        assert "parameters" in str(error.value)
        error = None
        assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
        optimizer.zero_grad()
        model(small).square().mean().backward()
        optimizer.step()
        assert region.report().peak_bytes <= region.report().budget_bytes
    plain = nn.Linear(64, 64)
    plain.load_state_dict(before)
    plain(small).square().mean().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))


def test_a_loop_without_an_optimizer_lets_its_batches_go() -> None:
    def states(region: tightfit.Online | None) -> torch.Tensor:
        torch.manual_seed(3)
        state = torch.zeros(64, 64)
        for _ in range(50):
            state = (state + torch.randn(1024, 64).T @ torch.ones(1024, 64)).tanh()
            if region is not None:
                region.keep(state)
        return state

    expected = states(None)
    gc.collect()
    with tightfit.online(resident_bytes() + 2_000_000) as region:
        assert torch.equal(states(region), expected)
        region.evict(AMPLE)
        assert region.report().evictions <= 4
    with pytest.raises(BadInput, match="inside the region"):
        region.keep(expected)


def test_a_backward_that_fails_holds_nothing_of_its_step() -> None:
    """Autograd's engine keeps what was still to run of one that raised, until another one runs."""
    weight, narrow = torch.randn(64, 64, requires_grad=True), torch.randn(64, requires_grad=True)
    wide = torch.randn(64, 2)

    def step(rows: int) -> None:
        y = torch.randn(rows, 64) @ weight
        for _ in range(10):
            y = y.tanh() * narrow  # gradients of narrow wait in the queue
        (y @ wide).repeat(1, 8192 // rows).square().sum().backward()

    gc.collect()
    held_bytes = resident_bytes()
    with tightfit.online(held_bytes + 1_000_000) as region:
        with pytest.raises(BudgetExceeded):
            step(2048)
        gc.collect()
        torch.ones(1) + 1
        assert resident_bytes() <= held_bytes + 64 * KIB
        step(256)
    assert region.report().peak_bytes <= held_bytes + 1_000_000


def test_what_asks_for_memory_outside_of_operators_is_a_named_error_too() -> None:
    with (
        pytest.raises(BudgetExceeded, match=r"outside PyTorch's operators"),
        tightfit.online(resident_bytes() + 100_000),
    ):
        copy.deepcopy(torch.UntypedStorage(1 << 20))


def test_thrashing_is_an_error_with_a_way_out() -> None:
    with (
        pytest.raises(InfeasibleBudget, match=r"thrash.*most_again="),
        tightfit.online(AMPLE, smallest=1, most_again=0.5) as region,
    ):
        _, y = chain(200)
        for _ in range(5):
            region.evict(AMPLE)
            y = y + 1


def test_leaving_brings_back_what_is_held_or_says_what_does_not_fit() -> None:
    with tightfit.online(AMPLE, smallest=1) as region:
        three = torch.ones(KIB) + 2
        region.evict(AMPLE)
    assert bool((three == 3).all())
    with tightfit.online(resident_bytes() + 200 * KIB) as region:
        _, y = chain(8, size=64 * KIB)
        region.evict(AMPLE)
    assert bool((y.detach() > 1).all())  # what it was computed from made room for it
    with (
        pytest.raises(BudgetExceeded, match=r"still holds .* at the end"),
        tightfit.online(resident_bytes() + 3 * 64 * KIB),
    ):
        kept = [torch.ones(16 * KIB) + n for n in range(4)]
    with pytest.raises(RuntimeError, match="data pointer"):
        sum(float(tensor.sum()) for tensor in kept)


def test_bad_regions_are_refused() -> None:
    with pytest.raises(BadInput, match="no eviction policy 'fifo'"):
        tightfit.online("1GiB", policy="fifo")
    with pytest.raises(BadInput, match="'sample' or 'all'"):
        tightfit.online("1GiB", search="some")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="must be positive"):
        tightfit.online("1GiB", most_again=0)
    with tightfit.online("1TiB"), pytest.raises(BadInput, match="cannot be nested"):
        tightfit.online("1TiB").__enter__()
    held = torch.ones(KIB)
    with pytest.raises(InfeasibleBudget, match="exist before"):
        tightfit.online(held.nbytes).__enter__()
    with pytest.raises(BadInput, match="inside the region"):
        tightfit.online("1TiB").evict("1MiB")


def test_the_report_says_where_the_time_went() -> None:
    model, loss_of = fresh("transformer")
    with tightfit.online(resident_bytes() + (14 << 20)) as region:
        train(model, loss_of, steps=1)
    report = region.report()
    parts = (report.compute_s, report.again_s, report.scoring_s, report.searching_s, report.rest_s)
    assert min(parts) >= 0 and report.compute_s > 0 and report.again_s > 0
    assert f"{report.evictions} evictions" in str(report) and "scoring" in str(report)
