"""Numbers at the border: text such as ``"8GiB"`` to ``int`` bytes and back, seconds, percent."""

from __future__ import annotations

import re
from decimal import Decimal

from tightfit.errors import BadInput

_UNITS: dict[str, int] = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_SIZE = re.compile(r"\s*(-?\d+(?:\.\d+)?(?:[eE]\+?\d{1,3})?)\s*([A-Za-z%]*)\s*")
_IN_ANY_CASE = {unit.lower(): factor for unit, factor in _UNITS.items()}
_LEAST_WITHOUT_UNIT = 10**6
_LARGEST_BYTES = 2**60


def rounded_up(size_bytes: int, granularity_bytes: int) -> int:
    """Return the least multiple of a granularity that is not below a size."""
    return -(-size_bytes // granularity_bytes) * granularity_bytes


def parse_bytes(size: int | str, *, what: str = "budget") -> int:
    """Return a size in bytes.

    `size`: bytes as an ``int``, or text with a unit in any case: B, KB, MB, GB, TB (powers of 1000)
    or KiB, MiB, GiB, TiB (powers of 1024). Text without one, such as ``"1e9"``, is bytes if it is
    at least a million: of less the unit was forgotten. `what`: the use of the size; named in the
    error. Raises `BadInput` if the size is negative or not positive, has no unit as text, or has an
    unknown one.
    """
    if isinstance(size, bool) or not isinstance(size, int | str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BadInput(
            f"the {what} must be bytes as an int or text such as '8GiB', "
            f"not {type(size).__name__} {size!r}"
        )
    value = size if isinstance(size, int) else _parse_text(size, what)
    if value <= 0:
        raise BadInput(f"the {what} must be positive, got {size!r}")
    if value > _LARGEST_BYTES:
        raise BadInput(f"the {what} of {size!r} is larger than any machine's memory")
    return value


def _parse_text(text: str, what: str) -> int:
    match = _SIZE.fullmatch(text)
    example = "write for example '8GiB', '600MiB' or '2.5GB'"
    if match is None:
        raise BadInput(f"cannot read the {what} {text!r}: {example}")
    number, unit = match.groups()
    if not unit and Decimal(number) >= _LEAST_WITHOUT_UNIT:
        return int(Decimal(number))
    if not unit:
        raise BadInput(
            f"the {what} {text!r} has no unit: {example}; bytes are an int, or '{number}B'"
        )
    if unit == "%":
        raise BadInput(f"the {what} {text!r} is a percentage, not a size: {example}")
    if unit.lower() not in _IN_ANY_CASE:
        known = ", ".join(_UNITS)
        raise BadInput(f"the {what} {text!r} has the unknown unit {unit!r} (known: {known})")
    return int(Decimal(number) * _IN_ANY_CASE[unit.lower()])


def unit_of(size_bytes: int) -> tuple[str, int]:
    """Return the binary unit in which a size is written, and how many bytes that unit has."""
    for unit in ("GiB", "MiB", "KiB"):
        if abs(size_bytes) >= _UNITS[unit]:
            return unit, _UNITS[unit]
    return "B", 1


def format_bytes(size_bytes: int) -> str:
    """Return bytes as text with a binary unit and up to two decimals, such as ``"1.50 GiB"``."""
    unit, unit_bytes = unit_of(size_bytes)
    return f"{size_bytes} B" if unit == "B" else f"{size_bytes / unit_bytes:.2f} {unit}"


def as_budget(size_bytes: int) -> str:
    """Return a size that a person can pass as a budget, not below the given one."""
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= 100 * factor:
            return f"{-(-size_bytes // factor)}{unit}"
        if size_bytes >= 10 * factor:
            return f"{-(-10 * size_bytes // factor) / 10:g}{unit}"
    return f"{size_bytes}B"


def format_seconds(seconds: float) -> str:
    """Return seconds as text with a fitting unit, such as ``"12.3 ms"``."""
    if abs(seconds) >= 1 or seconds == 0:
        return f"{seconds:.2f} s"
    if abs(seconds) >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.1f} us"


def format_percent(fraction: float) -> str:
    """Return a fraction as percent with two digits; zero after rounding has no sign.

    >>> format_percent(0.0123)
    '1.23 %'
    """
    return f"{round(100 * fraction, 2) + 0.0:.2f} %"
