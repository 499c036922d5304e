"""Instruction logs for tests: random programs, linear networks, and where the authors' lie."""

from __future__ import annotations

from pathlib import Path

from hypothesis import strategies as st

from tightfit.eviction.log.instructions import (
    Backward,
    Call,
    Constant,
    Copy,
    CopyFrom,
    Instruction,
    Mutate,
    Release,
    Result,
)

_ROOT = Path(__file__).resolve().parents[2]
_PLACES = [parent / "shared/data" for parent in (_ROOT.parent, _ROOT.parent.parent)]

DATA = next((place for place in _PLACES if place.exists()), _PLACES[0])


def call(name: str, *arguments: str, size: int = 1, time: int = 1) -> Call:
    """An operator with one result of its own."""
    return Call("op", arguments, (Result(name, size),), time)


def linear_network(length: int) -> list[Instruction]:
    """A chain and its backward pass: tensors of one byte, operators of one nanosecond.

    Appendix A.1 and A.2: what no later operator reads is released at once.
    """
    program: list[Instruction] = [call("t1")]
    program += [call(f"t{i}", f"t{i - 1}") for i in range(2, length + 1)]
    program += [Release(f"t{length}"), Backward(), call(f"g{length}", f"t{length - 1}")]
    for i in range(length - 1, 0, -1):
        before = [f"t{i - 1}"] if i > 1 else []
        program += [Release(f"t{i}"), call(f"g{i}", *before, f"g{i + 1}"), Release(f"g{i + 1}")]
    return program


@st.composite
def programs(draw: st.DrawFn, *, most: int = 30) -> list[Instruction]:
    """Valid programs that use every instruction; a released name may be used again."""
    sizes = st.sampled_from([0, 1, 2, 3, 5, 8])
    program: list[Instruction] = []
    held: list[str] = []
    known: list[str] = []
    for number in range(draw(st.integers(1, 3))):
        program.append(Constant(f"c{number}", draw(sizes)))
        known.append(f"c{number}")
        held.append(f"c{number}")
    for number in range(draw(st.integers(1, most))):
        kind = draw(st.sampled_from(["call"] * 6 + ["view", "mutate", "copy", "from", "backward"]))
        name = f"x{number}"
        source = known if draw(st.integers(0, 9)) == 0 else held or known
        arguments = tuple(draw(st.lists(st.sampled_from(source), min_size=1, max_size=3)))
        time = draw(st.integers(0, 4))
        if kind in ("call", "view"):
            made = [f"{name}.{n}" for n in range(draw(st.integers(1, 3)))]
            shares = st.sampled_from([None, *range(len(arguments))] if kind == "view" else [None])
            results = tuple(Result(other, draw(sizes), draw(shares)) for other in made)
            program.append(Call(kind, arguments, results, time))
            known += made
            held += made
        elif kind == "mutate":
            places = draw(st.lists(st.integers(0, len(arguments) - 1), unique=True, max_size=2))
            if all(argument in held for argument in arguments) and _differ(arguments, places):
                program.append(Mutate(kind, arguments, tuple(places), time))
        elif kind == "copy":
            program.append(Copy(name, arguments[0]))
            known.append(name)
            held.append(name)
        elif kind == "from" and arguments[-1] in held:
            program.append(CopyFrom(arguments[-1], arguments[0]))
        elif kind == "backward":
            program.append(Backward())
        for _ in range(draw(st.integers(0, 2)) if held else 0):
            program.append(Release(held.pop(draw(st.integers(0, len(held) - 1)))))
            if not held:
                break
    if not any(isinstance(instruction, Call) for instruction in program):
        program.append(call("last", "c0"))
    return program


def _differ(arguments: tuple[str, ...], places: list[int]) -> bool:
    return len({arguments[place] for place in places}) == len(places)
