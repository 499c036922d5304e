"""An arena whose steps begin with the calls of models: one for all that train in a thread."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

from tightfit.arenas.arena import Arena, ArenaReport
from tightfit.errors import BadInput


class Caller(Protocol):
    """The function that is called once a step."""

    @property
    def waiting(self) -> Sequence[Any]:
        """Calls that await their backward."""


class CallArena:
    """Everything the calling thread requests from one call to the next is a step.

    Models that train in turns in one thread share an arena, which is as high as the highest of
    their steps. A call of one model ends the step of another, unless that step awaits its backward:
    then it is part of that step.

    A call cannot begin a step while another arena or recording is active, from another thread, or
    when memory is short. Then it runs without an arena, which is counted.
    """

    def __init__(self) -> None:
        self._thread: _ThreadArena | None = None
        self._number = next(_NUMBERS)
        self.exact_height_bytes = 0

    def end_step(self) -> None:
        """End the step before, where another does not begin at once."""
        if self._thread is not None and self._thread.is_current:
            self._thread.end_step()

    def begin_step(self, shape: Hashable, caller: Caller) -> None:
        """End the step before, and begin a step that is called by its shape."""
        if self._thread is not None and not self._thread.is_current:
            return
        try:
            if self._thread is None:
                self._thread = _ThreadArena.of_this_thread(self)
            self._thread.begin_step((self._number, shape), self, caller)
        except (BadInput, RuntimeError, MemoryError):
            # another arena is entered, another recording runs, or there is no room for a mapping
            self.leave()

    def leave(self) -> None:
        """Give the memory back, once it is not shared and nothing in it is alive."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.leave(self)

    def drop_pages(self) -> None:
        if self._thread is not None:
            self._thread.arena.drop_pages()

    def went(self, exact_height_bytes: int) -> None:
        """Note the height of the layout that a step went by exactly; 0 if it did not."""
        self.exact_height_bytes = exact_height_bytes

    @property
    def report(self) -> ArenaReport | None:
        """Figures of the steps of all that share the arena; None while there is none."""
        return None if self._thread is None else self._thread.arena.report

    @property
    def is_running(self) -> bool:
        """Whether a step goes on, of this model or of another."""
        return self._thread is not None and self._thread.is_running

    @property
    def is_alone(self) -> bool:
        """Whether the arena, or the arena that the first step would use, is not shared."""
        thread = self._thread or _ARENAS.get(threading.get_ident())
        return thread is None or not thread.has_other_users(self)

    @property
    def resident_bytes(self) -> int:
        return 0 if self._thread is None else self._thread.arena.resident_bytes


class _ThreadArena:
    """The arena of a thread, with those whose steps use it."""

    def __init__(self) -> None:
        self.arena = Arena(yields=True).__enter__()
        self._thread = threading.get_ident()
        self._users: weakref.WeakSet[CallArena] = weakref.WeakSet()
        self._user: weakref.ref[CallArena] | None = None  # whose step runs
        self._caller: weakref.ref[Caller] | None = None
        self._end = weakref.finalize(self, self.arena.__exit__, None, None, None)
        self._end.atexit = False

    @classmethod
    def of_this_thread(cls, user: CallArena) -> _ThreadArena:
        """Return the arena of the calling thread, with a further user."""
        thread = threading.get_ident()
        found = _ARENAS.get(thread)
        if found is None:
            found = _ARENAS[thread] = cls()
        found._users.add(user)
        return found

    @property
    def is_current(self) -> bool:
        return self._thread == threading.get_ident()

    @property
    def is_running(self) -> bool:
        return self._caller is not None

    def has_other_users(self, user: CallArena) -> bool:
        return any(other is not user for other in self._users)

    def end_step(self) -> None:
        """End the step that runs, unless its backward is still to come."""
        caller = None if self._caller is None else self._caller()
        if caller is not None and caller.waiting:
            return
        self._caller = None
        self.arena.end_step()
        user = None if self._user is None else self._user()
        if user is not None:
            user.went(self.arena.exact_height_bytes)

    def begin_step(self, shape: Hashable, user: CallArena, caller: Caller) -> None:
        """Begin a step; a call inside another's step is part of that step."""
        self.end_step()
        if self._caller is None:
            self._user, self._caller = weakref.ref(user), weakref.ref(caller)
            self.arena.step(shape)

    def leave(self, user: CallArena) -> None:
        """End the step that runs; give the memory back if no other call uses it."""
        self._users.discard(user)
        self._caller = None
        self.end_step()
        if not self._users:
            self._end()
            if _ARENAS.get(self._thread) is self:
                del _ARENAS[self._thread]


_ARENAS: weakref.WeakValueDictionary[int, _ThreadArena] = weakref.WeakValueDictionary()
"""By the number of their thread."""

_NUMBERS = itertools.count()
