"""Measuring in processes of their own, which have everything imported and have run nothing yet."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeVar

__all__ = ["in_its_process", "in_turns"]

Result = TypeVar("Result")

_FORK = multiprocessing.get_context("fork")


def in_its_process(function: Callable[..., Result], *arguments: Any) -> Result:
    """Call a function in a process of its own and return what it returns."""
    (found,) = in_turns([lambda: lambda: function(*arguments)], 1)
    return found[0]


def in_turns(
    makers: Sequence[Callable[[], Callable[[], Result]]], rounds: int
) -> list[list[Result]]:
    """Let something be repeated in several processes that take turns.

    Parameters
    ----------
    makers : sequence of callable
        Each makes, in its process, what is repeated there.
    rounds : int
        How often each of them is repeated.

    Returns
    -------
    list of list
        What each returned, round by round.
    """
    started = [_started(maker) for maker in makers]
    found: list[list[Result]] = [[] for _ in makers]
    for _ in range(rounds):
        for number, (_, connection) in enumerate(started):
            connection.send(True)
            found[number].append(connection.recv())
    for process, connection in started:
        connection.send(False)
        process.join()
    return found


def _started(maker: Callable[[], Callable[[], Any]]) -> tuple[Any, Connection]:
    ours, theirs = _FORK.Pipe()

    def run() -> None:
        repeated = maker()
        while theirs.recv():
            theirs.send(repeated())

    process = _FORK.Process(target=run)
    process.start()
    theirs.close()
    return process, ours
