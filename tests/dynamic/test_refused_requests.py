"""Where requests are refused amid operators, as on a GPU: which run again, and which must not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import tightfit
from support.gpu_stand_in import RoomOnStandIn, stand_in
from tightfit.dynamic import region as region_module
from tightfit.dynamic.draws import Draws
from tightfit.dynamic.operators import operator_of
from tightfit.dynamic.room import CallingRoom, RetryingRoom, Room, allocated_bytes, storages_alive
from tightfit.errors import BadInput, BudgetExceeded

KIB = 1 << 10
MIB = 1 << 20
RUNS: list[str] = []


@torch.library.custom_op("tightfit_tests::add_then_ask", mutates_args={"x"})
def add_then_ask(x: torch.Tensor, size: int) -> None:
    """Write into an argument, and ask for memory when that is done."""
    RUNS.append("add")
    x.add_(1)
    torch.empty(size, dtype=torch.uint8).fill_(0)


@torch.library.custom_op(
    "tightfit_tests::draw_then_ask", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def draw_then_ask(x: torch.Tensor, size: int) -> torch.Tensor:
    """Draw random numbers, and ask for memory when that is done."""
    RUNS.append("draw")
    drawn = torch.rand(x.shape)
    torch.empty(size, dtype=torch.uint8).fill_(0)
    return drawn + x


@pytest.fixture(params=["refused", "GPU"], autouse=True)
def rooms(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Room]:
    """Let every region have a room that refuses; return those that were made."""
    kind = RetryingRoom
    if request.param == "GPU":
        stand_in(monkeypatch)
        kind = RoomOnStandIn
    made: list[Room] = []

    def room_on(*args: object) -> Room:
        made.append(kind(*args))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(region_module, "room_on", room_on)
    RUNS.clear()
    return made


def region_with(further_bytes: int) -> tightfit.Online:
    """Return a region that has room for so much more than there is, and for numbers."""
    further_bytes += 64 * KIB
    return tightfit.online(further_bytes + sum(map(allocated_bytes, storages_alive())))


def evictable(count: int = 12) -> list[torch.Tensor]:
    """Return tensors of 256 KiB each that can be computed again."""
    return [torch.ones(64 * KIB) * n for n in range(count)]


def test_an_operator_that_is_refused_runs_again(rooms: list[Room]) -> None:
    with region_with(4 * MIB) as region:
        held = evictable()
        doubled = torch.cat(held[:6]) * 2
        assert doubled.sum() == 2 * 15 * 64 * KIB
        del doubled
    report = region.report()
    assert rooms[0].refusals().count > 0 and report.evictions > 0
    assert report.peak_bytes <= report.budget_bytes
    assert all(bool((tensor == n).all()) for n, tensor in enumerate(held))


def test_what_is_drawn_again_are_the_same_numbers() -> None:
    torch.manual_seed(3)
    x = torch.ones(KIB)
    expected, state = draw_then_ask(x, MIB), torch.get_rng_state()
    torch.manual_seed(3)
    RUNS.clear()
    with region_with(4 * MIB) as region:
        held = evictable(15)
        found = draw_then_ask(x, MIB)
        assert RUNS == ["draw", "draw"]
        assert torch.equal(found, expected) and torch.equal(torch.get_rng_state(), state)
        del held
    assert region.report().evictions > 0


def test_what_may_have_begun_to_write_is_an_error_once_and_has_room_the_next_time() -> None:
    x = torch.zeros(KIB)
    with region_with(4 * MIB):
        held = evictable(15)
        with pytest.raises(BudgetExceeded, match=r"add_then_ask needs 1\.00 MiB.*may have begun"):
            add_then_ask(x, MIB)
        assert RUNS == ["add"]
        before = x.clone()
        add_then_ask(x, MIB)
        assert RUNS == ["add", "add"] and torch.equal(x, before + 1)
        assert all(bool((tensor == n).all()) for n, tensor in enumerate(held))


def test_a_write_that_has_room_for_its_arguments_needs_no_second_run() -> None:
    """As large as all it is given: that much is made free before an operator runs first."""
    x = torch.zeros(128 * KIB)
    with region_with(4 * MIB) as region:
        held = evictable(15)
        add_then_ask(x, 512 * KIB)
        assert RUNS == ["add"] and region.report().evictions > 0
        evictions = region.report().evictions
        x.mul_(2)  # nothing is asked for, which is known the second time
        held = evictable(15)
        evictions = region.report().evictions
        x.mul_(2)
        assert region.report().evictions == evictions and bool((x == 4).all())
        del held


def test_a_result_that_is_given_has_its_size_back() -> None:
    one, two = torch.ones(256 * KIB), torch.full((256 * KIB,), 3.0)
    with region_with(4 * MIB):
        held = evictable(15)
        given = torch.empty(0)
        torch.sub(two, one, out=given)
        assert given.shape == (256 * KIB,) and bool((given == 2).all())
        del held


def test_what_is_asked_for_outside_of_operators_is_an_error_with_a_way_out() -> None:
    with pytest.raises(BudgetExceeded, match=r"call region\.evict\(.*\) before"), region_with(MIB):
        torch.UntypedStorage(2 * MIB).clone()
    with region_with(4 * MIB) as region:
        held = evictable(15)
        region.evict(2 * MIB)
        torch.UntypedStorage(2 * MIB)
        assert bool((held[3] == 3).all())


def test_a_region_on_a_gpu_needs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BadInput, match="sees 0 CUDA devices"):
        tightfit.online("1GiB", device="cuda")
    with pytest.raises(BadInput, match="the CPU or a CUDA device"):
        tightfit.online("1GiB", device="meta")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(BadInput, match="is for the CPU"):
        tightfit.online("1GiB", device="cuda:1", core="C++")
    assert isinstance(tightfit.online("1GiB", device="cuda:1"), tightfit.Online)


def test_what_draws_on_a_gpu_draws_from_its_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    generators = torch.Generator(), torch.Generator()
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    draws = Draws(CallingRoom(1 << 40, 0))
    on_gpu = torch.ones(2)
    assert draws.state_before((on_gpu,), {})[0] is torch.default_generator
    assert draws.state_before((), {"device": torch.device("cuda:1")})[0] is generators[1]
    assert draws.state_before((), {"device": "cuda"})[0] is generators[0]
    own = torch.Generator()
    given = {"device": "cuda", "generator": own}
    assert draws.state_before((), given)[0] is own


def test_what_recurrent_kernels_overwrite_unsaid_keeps_them_from_running_again() -> None:
    forward = operator_of(torch.ops.aten._cudnn_rnn.default)
    backward = operator_of(torch.ops.aten._cudnn_rnn_backward.default)
    state = torch.ones(8)
    assert forward.repeats_with((), {"dropout_state": None})
    assert not forward.repeats_with((), {"dropout_state": state})
    assert not backward.repeats_with((), {"dropout_state": None, "reserve": state})


def test_a_room_knows_what_lies_on_its_device() -> None:
    room = CallingRoom(1 << 40, 0)
    assert room.has(torch.ones(1)) and not room.has(torch.ones(1, device="meta"))
    assert not room.has(SimpleNamespace(device=torch.device("cuda:0")))  # type: ignore[arg-type]
