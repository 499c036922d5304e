"""Who was planned last over each byte."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tightfit.layout.predecessors import predecessors

REQUESTS = st.lists(st.tuples(st.integers(0, 5), st.integers(-1, 12)), max_size=20)


@given(REQUESTS)
def test_it_agrees_with_a_map_of_every_byte(requests: list[tuple[int, int]]) -> None:
    owner: dict[int, int] = {}
    expected: list[tuple[int, ...]] = []
    for number, (size, offset) in enumerate(requests):
        held = range(offset, offset + size) if offset >= 0 else range(0)
        expected.append(tuple(sorted({owner[byte] for byte in held if byte in owner})))
        owner |= dict.fromkeys(held, number)
    sizes, offsets = zip(*requests, strict=True) if requests else ((), ())
    assert list(predecessors(sizes, offsets)) == expected
