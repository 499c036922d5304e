"""A search in the background outlives what other threads may do to it."""

from __future__ import annotations

import threading
import time

from benchmarks.training import let_search_end
from tightfit.plan.plan import Outcome
from tightfit.planners.background import Search, searching
from tightfit.planners.outcomes import no_plan
from tightfit.progress import Progress


def test_a_search_that_was_disturbed_runs_again() -> None:
    """`gc.get_objects` of another thread makes tuples of this one fail now and then."""
    nothing = no_plan(started=time.perf_counter(), proven=False)
    runs: list[Progress] = []

    def plan(progress: Progress) -> Outcome:
        runs.append(progress)
        if len(runs) < 3:
            raise SystemError("Objects/tupleobject.c:927: bad argument to internal function")
        return nothing

    search = Search(plan)
    search.wait()
    assert search.result() is nothing
    assert len(runs) == 3


def test_one_that_is_cancelled_before_its_turn_is_over() -> None:
    let_search_end()
    may_end = threading.Event()
    ran: list[Progress] = []
    first = Search(lambda progress: may_end.wait())
    second = Search(ran.append)
    second.cancel()
    second.wait()
    assert second.result() is None and not ran and searching()
    may_end.set()
    first.wait()
    assert first.result() and not searching()
