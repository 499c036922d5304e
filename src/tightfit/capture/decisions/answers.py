"""Operators whose results decide how a step goes on, as ops of its plan that check the answer.

A forward may ask a computed tensor for its value, or select by a computed mask: what runs next, or
how large it is, then depends on data. Such a step is captured for the answers of one call; each
asking operator becomes an op of the plan that compares what it finds with what was planned for.
Another answer ends the forward before it has changed anything, and the plan for that answer runs
instead.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import fx

from tightfit.capture.calls.geometry import Geometry
from tightfit.capture.calls.structure import unflatten
from tightfit.errors import CaptureError, Diverged

__all__ = [
    "Answer",
    "Question",
    "answer_of",
    "is_asking",
    "question_of",
    "refuse_drawn",
    "refuse_measure",
    "selected_from",
]

aten = torch.ops.aten

_SIZED = frozenset(
    {
        aten.nonzero.default,
        aten._unique2.default,
        aten.unique_dim.default,
        aten.unique_consecutive.default,
        aten.bincount.default,
    }
)
_TELLS_A_NUMBER = (aten._local_scalar_dense.default, aten.equal.default)
_MASKS = (torch.bool, torch.uint8)
_TENSOR = object()
_QUESTIONS: weakref.WeakValueDictionary[int, Question] = weakref.WeakValueDictionary()
_KEYS = itertools.count()

_LIBRARY = torch.library.Library("tightfit", "FRAGMENT")
# the tag keeps it in a trace although nobody may read its result
_LIBRARY.define(
    "asked(Tensor[] tensors, int key) -> Tensor[]", tags=(torch.Tag.nondeterministic_seeded,)
)
_ASKED = torch.ops.tightfit.asked.default


@dataclass(frozen=True)
class Answer:
    """What an operator told: a number, or how its results lie in memory.

    Parameters
    ----------
    operator : str
        Its name.
    value : bool, int, float, or tuple of Geometry
        A number read in Python, or how each result lies in memory.
    """

    operator: str
    value: Any

    def is_to(self, function: Any, args: Sequence[Any]) -> bool:
        """Whether an operator can have told this of its arguments."""
        if self.operator != function.name():
            return False
        is_number = not isinstance(self.value, tuple)
        is_bool = function is aten.equal.default or args[0].dtype is torch.bool
        return not is_number or is_bool == isinstance(self.value, bool)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Answer) or self.operator != other.operator:
            return False
        a, b = self.value, other.value
        return bool(type(a) is type(b) and (a == b or (a != a and b != b)))

    def __hash__(self) -> int:
        return hash(self.operator)

    def __str__(self) -> str:
        if isinstance(self.value, tuple):
            shapes = " and ".join(str(list(g.shape)) for g in self.value)
            return f"{self.operator} gives {shapes}"
        return f"{self.operator} reads {self.value}"


def selected_from(
    function: Any, args: Sequence[Any]
) -> tuple[torch.Tensor, list[torch.Tensor]] | None:
    """Return what an operator selects from and the masks or lengths that decide how much."""
    if function in (aten.masked_select.default, aten._pack_padded_sequence.default):
        return args[0], [args[1]]
    if function is not aten.index.Tensor:
        return None
    masks = [i for i in args[1] if isinstance(i, torch.Tensor) and i.dtype in _MASKS]
    return (args[0], masks) if masks else None


def is_asking(function: Any, args: Sequence[Any], kwargs: Any) -> bool:
    """Whether an operator tells Python something about the values of tensors."""
    if function in _TELLS_A_NUMBER:
        return True
    if function is aten.repeat_interleave.Tensor:
        given = dict(zip(("repeats", "output_size"), args, strict=False)) | kwargs
        return given.get("output_size") is None
    return function in _SIZED or selected_from(function, args) is not None


def answer_of(function: Any, result: Any) -> Answer:
    """Return what an operator told."""
    tensors = result if isinstance(result, tuple | list) else (result,)
    if all(isinstance(t, torch.Tensor) for t in tensors):
        return Answer(function.name(), tuple(Geometry.of(t) for t in tensors))
    return Answer(function.name(), result)


def refuse_measure(answer: Answer, last: str) -> NoReturn:
    """Refuse what takes another value in every step: no plan would ever run twice.

    Raises
    ------
    CaptureError
        Names the module that ran last.
    """
    where = f"after module {last!r}" if last else "in the outermost forward"
    raise CaptureError(
        f"the forward reads a computed number in Python, {answer.value}, {where}, and decides by "
        "it: it is another one in every step, and each would need a plan of its own. Way out: "
        "leave it a tensor; compare first and read the answer (`if (x > 3):`, not `if x.item() > "
        "3:`); for logging return it detached; or move what needs it into a module of its own"
    )


def refuse_drawn(module: str) -> None:
    """Refuse to decide by a number that is drawn, so that it is another one in every step."""
    raise CaptureError(
        f"module {module!r} decides what it runs by a number that it draws: it is another one in "
        "every step. Way out: leave it out of the fitted part, or multiply by the drawn number",
        module=module,
        cause="random",
    )


class Question:
    """One operator that is asked in every step, and the answer the step was captured for.

    Parameters
    ----------
    function : OpOverload
        The operator.
    leaves, spec : list, TreeSpec
        Its flattened arguments and how they nest.
    answer : Answer
        What it told when the step was captured.
    inside, after : str
        The module whose forward asks, and the one that had run last.
    """

    def __init__(
        self,
        function: Any,
        leaves: Sequence[Any],
        spec: Any,
        answer: Answer,
        inside: str = "",
        after: str = "",
    ) -> None:
        self.function = function
        self.leaves = tuple(_TENSOR if isinstance(x, torch.Tensor) else x for x in leaves)
        self.spec = spec
        self.answer = answer
        self.inside = inside
        self.after = after
        self.key = next(_KEYS)
        _QUESTIONS[self.key] = self

    def __repr__(self) -> str:
        plain = ["tensor" if x is _TENSOR else repr(x) for x in self.leaves]
        return f"{self.answer} of {', '.join(plain)}"

    @property
    def is_number(self) -> bool:
        """Whether its answer is a number, not how large a tensor is."""
        return not isinstance(self.answer.value, tuple)

    def asked(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Put the question into the trace; return what stands for its results."""
        return _ASKED(tensors, self.key)

    def empty_results(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return new tensors that lie as the results do; one byte for a number."""
        if isinstance(self.answer.value, tuple):
            return [geometry.empty() for geometry in self.answer.value]
        return [tensors[0].new_empty(1, dtype=torch.uint8)]

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, Any]:
        """Return the arguments and keyword arguments of the operator."""
        given = iter(tensors)
        return unflatten([next(given) if x is _TENSOR else x for x in self.leaves], self.spec)

    def run(self, tensors: Sequence[torch.Tensor]) -> tuple[Answer, list[torch.Tensor]]:
        """Run the operator; return what it tells now and its results."""
        args, kwargs = self.arguments(tensors)
        result = self.function(*args, **kwargs)
        answer = answer_of(self.function, result)
        if isinstance(answer.value, tuple):
            return answer, list(result) if isinstance(result, tuple | list) else [result]
        return answer, self.empty_results(tensors)

    def unchecked(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the operator whatever it tells, to be measured."""
        return self.run(tensors)[1]

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the operator inside a program.

        Raises
        ------
        Diverged
            If it tells something else than when the step was captured.
        """
        answer, results = self.run(tensors)
        if answer != self.answer:
            raise Diverged(f"{answer}, but the step was planned for a call in which {self.answer}")
        return results


@torch.library.register_fake("tightfit::asked")
def _fake_asked(tensors: list[torch.Tensor], key: int) -> list[torch.Tensor]:
    return _QUESTIONS[key].empty_results(tensors)


def question_of(node: fx.Node) -> Question | None:
    """Return the question a traced node asks, if it does."""
    return _QUESTIONS[node.args[-1]] if node.target is _ASKED else None  # type: ignore[index]
