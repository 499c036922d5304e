"""Properties of an operator that the runtime needs, read once from its schema."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tightfit.torch_private.core import is_made_of_others


@dataclass(frozen=True)
class Argument:
    position: int  # among all arguments
    name: str  # as a keyword

    def of(self, args: Any, kwargs: Any) -> Any:
        """Return its value in a call; None if there is none."""
        return args[self.position] if self.position < len(args) else kwargs.get(self.name)


@dataclass(frozen=True)
class Operator:
    """The properties of an operator that the runtime needs."""

    name: str  # as torch writes it
    is_composite: bool  # it is made of others, which are seen one by one
    is_view: bool  # its result is a view of its argument; nothing is computed
    makes_blank: bool  # its result has no content yet: its caller may write it unseen
    draws: bool  # it draws random numbers
    # It may run again: it has no effects but its results and the writes that its schema names
    repeats: bool
    weight: int  # how much a byte costs, compared with an elementwise operator
    written: tuple[Argument, ...]  # those it overwrites
    replaces: bool  # it does not read the tensors it overwrites
    # Running statistics: written in training only, and not read then
    statistics: tuple[Argument, ...]
    training: Argument | None  # says whether it is training
    takes_dtype: bool  # it may take the type of its result
    # Those it overwrites although its schema does not say so
    written_unsaid: tuple[Argument, ...] = ()

    def repeats_with(self, args: Any, kwargs: Any) -> bool:
        """Whether a call may run again."""
        return self.repeats and all(a.of(args, kwargs) is None for a in self.written_unsaid)

    def trains(self, args: Any, kwargs: Any) -> bool:
        """Whether a call only writes its running statistics."""
        if not self.statistics:
            return False
        return self.training is None or bool(self.training.of(args, kwargs))

    def unread(self, args: Any, kwargs: Any) -> dict[str, str]:
        """Return the names of arguments whose content a call does not read, and why not."""
        found = {a.name: "replaced" for a in self.written} if self.replaces else {}
        if self.trains(args, kwargs):
            found |= {a.name: "statistics" for a in self.statistics}
        return found


_BLANK = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "empty_permuted",
}
_ALIASES = {"_unsafe_view", "_reshape_alias", "lift_fresh", "detach", "alias"}
_REPLACING = {
    "bernoulli_",
    "cauchy_",
    "copy_",
    "exponential_",
    "fill_",
    "geometric_",
    "log_normal_",
    "normal_",
    "random_",
    "uniform_",
    "zero_",
}
_STATISTICS = ("running_mean", "running_var")
_WRITTEN_UNSAID = {"dropout_state", "reserve"}  # by cuDNN's recurrent kernels
_HEAVY = ("mm", "conv", "matmul", "linear", "attention", "rnn", "lstm", "gru")
_HEAVY_WEIGHT = 8
_WITH_EFFECTS = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "profiler"}
"""Namespaces of operators that wait for other processes, or that are counted."""


@cache
def operator_of(function: Any) -> Operator:
    schema = function._schema
    space, name = schema.name.split("::")
    arguments = [Argument(n, argument.name) for n, argument in enumerate(schema.arguments)]
    written = [a for a in arguments if _is_written(schema.arguments[a.position])]
    statistics = [a for a in arguments if a.name in _STATISTICS and "backward" not in name]
    training = next((a for a in arguments if a.name in ("training", "train")), None)
    only_out = bool(written) and all(schema.arguments[a.position].is_out for a in written)
    return Operator(
        name=f"{space}.{name}",
        is_composite=is_made_of_others(function),
        is_view=function.is_view or (space == "aten" and name in _ALIASES),
        makes_blank=space == "aten" and name in _BLANK,
        draws=torch.Tag.nondeterministic_seeded in function.tags,
        repeats=space not in _WITH_EFFECTS,
        weight=_HEAVY_WEIGHT if any(part in name for part in _HEAVY) else 1,
        written=tuple(a for a in written if a not in statistics),
        replaces=only_out or name in _REPLACING,
        statistics=tuple(statistics),
        training=training,
        takes_dtype=any(a.name == "dtype" for a in arguments),
        written_unsaid=tuple(a for a in arguments if a.name in _WRITTEN_UNSAID),
    )


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write
