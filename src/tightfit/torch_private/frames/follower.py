"""Who is asked while Dynamo follows the Python of a callable."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn

from tightfit.torch_private.frames.ends import End


@dataclass(frozen=True)
class Given:
    """The arguments of a call of a module's forward."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class Follower:
    """Who is asked while Dynamo follows the Python of a callable; by itself it wants nothing."""

    def call(self) -> tuple[int, Any]:
        """Return the number of the current call, and its inputs."""
        return 1, None

    def modules(self) -> Iterable[nn.Module]:
        """Return the modules of the callable; those inside of them count as well."""
        return ()

    def leaves(self) -> Mapping[Any, Callable[..., Any]]:
        """Return the functions that are not to be followed, each with its results on fakes."""
        return {}

    def left_out(self) -> Set[nn.Module]:
        """Return the modules whose forwards are to run as plain Python."""
        return frozenset()

    def one_op_at(self, places: Sequence[tuple[str, int]]) -> Any:
        """Return the forward that may become one op and contains the innermost of some calls.

        `places`: the file and line of each call, the outermost first.
        """
        return None

    def try_as_one_op(self, forward: Any, given: Given | None) -> None:
        """Decide whether a forward is not to be followed from now on.

        `given`: inputs of a call, on fake tensors. None: it cannot be a leaf.
        """

    def follow_all_again(self) -> bool:
        """Follow code again that was no longer followed; return whether there is any."""
        return False

    def ended(self, end: End) -> None:
        """Note the end of a graph, before anything of it runs."""

    def following(self) -> AbstractContextManager[None]:
        """Return the context in which a frame is looked at."""
        return nullcontext()

    def entered_inner_frame(self) -> None:
        """Note that a module's forward is traced by itself: Python runs its caller."""

    def skipped(
        self, code: types.CodeType, module: nn.Module | None, reason: str, error: Exception | None
    ) -> None:
        """Note that a frame will run as plain Python, and of the error that Dynamo has met."""

    def runs_as_compiled(self, place: str) -> None:
        """Note that code asks whether it is compiled, where it has to run as if it were.

        `place`: file and line.
        """
