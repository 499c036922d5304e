"""Which content is in which storage, from when a program holds the storage until it does not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tightfit.dynamic.contents import Contents, NotPlain
from tightfit.dynamic.history import MARK, Call, Content
from tightfit.dynamic.ledger import Ledger
from tightfit.dynamic.pool import Candidates, Pool
from tightfit.dynamic.room import CallingRoom
from tightfit.eviction.policies.registry import policy_named

KIB = 1 << 10


class Region:
    """The contents of a region, with its room and what may be evicted."""

    def __init__(self, before_bytes: int = 0) -> None:
        self.room = CallingRoom(1 << 40, before_bytes)
        self.pool = Pool(
            policy_named("lru"), Ledger(1 << 40, 1e9), Candidates(1, are_all_scored=True)
        )
        self.contents = Contents(self.room, self.pool)

    def exists(self, tensor: Tensor) -> Content:
        """Let a tensor be there before the region; return its content."""
        self.contents.mark_existing([tensor.untyped_storage()])
        return self.of(tensor)

    def computed(self, tensor: Tensor, *read: Tensor, cost: int = 1) -> Content:
        """Let a tensor be a result, or written over by one, that reads others."""
        reads = {self.of(each): each.untyped_storage() for each in read}
        call = Call(None, (), {}, reads, cost, with_grad=False)
        made = self.contents.put(tensor.untyped_storage(), Content(tensor.nbytes, call))
        call.made([made])
        return made

    def of(self, tensor: Tensor) -> Content:
        found = self.contents.of_tensor(tensor)
        assert found is not None
        return found


@pytest.fixture
def region() -> Iterator[Region]:
    made = Region()
    yield made
    made.contents.close()


def kib() -> Tensor:
    return torch.ones(KIB, dtype=torch.uint8)


def test_all_views_of_a_storage_have_one_content(region: Region) -> None:
    tensor, other = torch.ones(4, 6), torch.ones(4, 6)
    content = region.exists(tensor)
    for view in (tensor[1:, 2], tensor.t(), tensor.detach(), tensor.view(torch.int32)):
        assert region.of(view) is content
        assert region.contents.content_in(view) == (content, tensor.untyped_storage())
    assert region.contents.of_tensor(other) is None
    met, _ = region.contents.content_in(other)
    assert met is not content and region.of(other[0]) is met and met.maker is None


def test_tensors_without_one_storage_have_no_content(region: Region) -> None:
    sparse = torch.eye(4).to_sparse()
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    for tensor in (sparse, nested):
        assert region.contents.of_tensor(tensor) is None
        with pytest.raises(NotPlain):
            region.contents.content_in(tensor)
        with pytest.raises(NotPlain):
            region.contents.new_among((kib(), tensor))


def test_new_storages_among_results_are_found_once_each(region: Region) -> None:
    known, one, two = kib(), kib(), kib()
    region.exists(known)
    results = (one, [known[4:], one[2:], two, None], torch.empty(0), torch.ones(3, device="meta"))
    found = region.contents.new_among(results)
    assert [each.data_ptr() for each in found] == [one.data_ptr(), two.data_ptr()]
    assert region.contents.new_among(known) == []


def test_what_can_be_computed_again_may_be_evicted_and_all_else_stays(region: Region) -> None:
    given, small, large = kib(), kib(), torch.ones(3, KIB)
    region.exists(given)
    made = [region.computed(small, given), region.computed(large, given)]
    assert region.contents.computed() == made
    assert region.contents.weights() == (KIB, KIB + 12 * KIB)
    assert region.pool.free(1 << 30)
    assert region.contents.weights() == (KIB, 0) and bool((given == 1).all())
    assert region.contents.computed() == made  # the program holds them
    assert not any(content.is_resident for content in made)


def test_a_result_that_the_program_frees_is_gone(region: Region) -> None:
    given, result = kib(), kib()
    region.exists(given)
    made = region.computed(result, given)
    del result
    assert made.is_resident  # as long as nothing has asked
    region.contents.process_frees()
    assert not made.is_held and not made.is_resident
    assert region.contents.computed() == [] and region.contents.weights() == (KIB, 0)
    assert not region.pool.free(1)


def test_what_an_evicted_result_needs_is_held_until_the_program_frees_that_result(
    region: Region,
) -> None:
    given, between, result = kib(), kib(), kib()
    region.exists(given)
    read = region.computed(between, given)
    made = region.computed(result, between)
    region.pool.evict(made)
    del between
    region.contents.process_frees()
    assert read.is_resident and region.contents.weights() == (KIB, KIB)
    del result
    for _ in range(2):  # the one that it needed ends by that
        region.contents.process_frees()
    assert not read.is_resident and region.contents.weights() == (KIB, 0)


def test_a_storage_that_is_written_in_place_holds_something_else(region: Region) -> None:
    given, result = kib(), kib()
    region.exists(given)
    old = region.computed(result, given)
    new = region.computed(result, given)
    assert region.of(result) is new and not old.is_held and not old.is_resident
    assert region.contents.computed() == [new]
    assert region.contents.weights() == (KIB, KIB)
    assert region.pool.free(1) and not new.is_resident
    assert not region.pool.free(1)  # the old is no candidate


def test_a_copy_of_what_is_written_over_stays_for_those_that_wait_for_it(region: Region) -> None:
    given, result = kib(), kib()
    region.exists(given)
    old = region.computed(result, given)
    copied = result.untyped_storage().clone()
    old.move(copied)
    region.computed(result, given)
    assert old.is_resident and old.memory is copied
    assert region.contents.weights() == (KIB, KIB)  # the copy is known to the runtime only
    assert region.pool.free(1 << 30) and not old.is_resident  # and goes like any other


def test_what_lies_on_another_device_takes_no_room(region: Region) -> None:
    region.exists(kept := kib())
    region.exists(elsewhere := torch.ones(KIB, dtype=torch.uint8, device="meta"))
    assert region.of(elsewhere) is not region.of(kept)
    assert region.contents.weights() == (KIB, 0)


def test_what_is_written_over_is_not_held_for_those_that_read_it(region: Region) -> None:
    """Whoever reads it later needs it in memory of its own: the storage may end."""
    given, result = kib(), kib()
    region.exists(given)
    made = region.computed(result, given)
    region.contents.put(given.untyped_storage(), Content(KIB, None))
    del given
    region.contents.process_frees()
    assert region.contents.weights() == (0, KIB) and made.is_resident


def test_a_storage_is_held_for_results_that_cannot_be_computed_without_it(region: Region) -> None:
    given, result = kib(), kib()
    region.exists(given)
    region.computed(result, given)
    del given
    region.contents.process_frees()
    assert region.contents.weights() == (KIB, KIB)
    del result
    for _ in range(2):
        region.contents.process_frees()
    assert region.contents.weights() == (0, 0)


@pytest.mark.parametrize("is_written", [False, True], ids=["as it was", "written in place"])
def test_memory_from_before_the_region_leaves_room_when_it_ends(is_written: bool) -> None:
    held, existing = kib(), torch.ones(KIB - 3, dtype=torch.uint8)
    region = Region(before_bytes=2 * KIB)
    region.exists(held)
    region.exists(existing)
    if is_written:
        region.computed(existing, held)
    del existing
    region.contents.process_frees()
    assert region.room.held_bytes == KIB  # the allocator had rounded it up
    made = kib()
    region.computed(made, held)
    del made
    region.contents.process_frees()
    assert region.room.held_bytes == KIB
    region.contents.close()


def test_nothing_is_left_of_a_region_that_is_over(region: Region) -> None:
    given, result = kib(), kib()
    contents = [region.exists(given), region.computed(result, given)]
    region.contents.close()
    assert not any(hasattr(t.untyped_storage(), MARK) for t in (given, result))
    assert not any(content.is_held for content in contents)
    assert region.contents.computed() == [] and region.contents.weights() == (0, 0)
    del given, result
    region.contents.process_frees()
