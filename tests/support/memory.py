"""Memory of a process that does not depend on what earlier tests have left in its heap."""

from __future__ import annotations

import concurrent.futures
import contextlib
import mmap
import multiprocessing
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def fresh_process() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Yield what runs functions, in turn, in an interpreter of their own and raises their errors.

    What a process holds besides tensors is known to some MiB there. Where thousands of tests
    have run before, the heap gives pages back that they had used.
    """
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        yield lambda function: pool.submit(function).result()


def in_a_fresh_process(function: Callable[[], None]) -> None:
    """Run a function in an interpreter of its own; raise what it raises."""
    with fresh_process() as run:
        run(function)


def held_pages(size_bytes: int) -> mmap.mmap:
    """Return memory that is resident now and was not before, whatever the heap has free."""
    pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for page in range(0, size_bytes, mmap.PAGESIZE):
        pages[page] = 1
    return pages
