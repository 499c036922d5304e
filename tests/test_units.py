"""Sizes as people write them: read exactly, printed readably, refused clearly."""

from __future__ import annotations

import pytest

from tightfit.errors import BadInput
from tightfit.units import format_bytes, format_percent, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("8GiB", 8 << 30),
        ("2.5 GB", 2_500_000_000),
        (" 600MiB ", 600 << 20),
        ("7B", 7),
        (123, 123),
        ("600mib", 600 << 20),
        ("8gib", 8 << 30),
        ("8GIB", 8 << 30),
        ("2.5gb", 2_500_000_000),
        ("1e9", 10**9),
        ("1.5E9", 1_500_000_000),
        ("1e3MiB", 1000 << 20),
        ("2000000000", 2_000_000_000),
    ],
)
def test_sizes_are_read(text: int | str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("8", "has no unit"),
        ("80%", "is a percentage"),
        ("8g", "unknown unit 'g'"),
        ("8 GiB more", "cannot read"),
        ("", "cannot read"),
        ("1e3", "has no unit"),
        ("1e-3GiB", "cannot read"),
        ("1e", "has the unknown unit 'e'"),
        ("1e999GiB", "larger than any machine's memory"),
        ("-8GiB", "must be positive, got '-8GiB'"),
        (0, "must be positive"),
        (-5, "must be positive"),
        ("0GiB", "must be positive"),
        (1 << 61, "larger than any machine's memory"),
        (True, "not bool True"),
        (8.5, "not float 8.5"),
        (None, "not NoneType None"),
    ],
)
def test_anything_else_is_refused(size: object, message: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_bytes(size, what="budget")  # type: ignore[arg-type]
    assert message in str(caught.value)
    assert "the budget" in str(caught.value)


def test_sizes_and_times_are_printed_with_a_fitting_unit() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1536, 3 << 20, 5 << 29)] == [
        "0 B",
        "1023 B",
        "1.50 KiB",
        "3.00 MiB",
        "2.50 GiB",
    ]
    assert [format_seconds(s) for s in (0, 2.5, 0.0123, 4e-6)] == [
        "0.00 s",
        "2.50 s",
        "12.3 ms",
        "4.0 us",
    ]


@pytest.mark.parametrize(
    ("fraction", "text"), [(0.01234, "1.23 %"), (-1e-9, "0.00 %"), (-0.02, "-2.00 %")]
)
def test_percent_has_no_sign_when_it_rounds_to_nothing(fraction: float, text: str) -> None:
    assert format_percent(fraction) == text
