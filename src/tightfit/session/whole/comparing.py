"""Compares postponed alternatives between steps, in a part of the time that a step takes."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from tightfit.execution.guard import left_out
from tightfit.session.default_addresses import DefaultAddresses
from tightfit.session.memory.account import Account
from tightfit.session.options import Options
from tightfit.session.whole.postponed import PostponedAlternatives
from tightfit.session.whole.specialisation import Specialisation

_PART = 0.05  # of the least time from one call to the next


class ComparisonSchedule:
    """Decides when alternatives of a callable's steps are compared, and when plans may use them."""

    def __init__(self, account: Account, addresses: DefaultAddresses) -> None:
        self._account = account
        self._addresses = addresses
        self._began: float | None = None
        self._step_s = math.inf
        self._allowed_s = 0.0  # by steps so far, not spent yet; below 0: spent in advance

    def room_bytes(self, options: Options) -> int:
        """Return the bytes that measuring operators may hold now."""
        usable_bytes = options.usable_bytes - self._addresses.measuring_bytes(options)
        return usable_bytes - self._account.held_bytes()

    def go_on(self, spec: Specialisation, options: Options, waiting: Sequence[object]) -> None:
        """Compare for a while; use the alternatives once all are compared and the steps are timed.

        A comparison may take longer than a step allows; then the next steps allow for none. Nothing
        is compared while earlier calls await their backward.
        """
        begun, self._began = self._began, None
        if spec.postponed is not None and begun is not None and not waiting:
            self._step_s = min(self._step_s, time.perf_counter() - begun)
            if spec.has_comparisons:
                self._compare(spec.postponed, options)
            if spec.postponed.is_done and (spec.tuner is None or spec.tuner.is_ready):
                self.end(spec, options)
        self._began = time.perf_counter() if spec.plans else None  # else it is planned first

    def _compare(self, postponed: PostponedAlternatives, options: Options) -> None:
        self._allowed_s += _PART * self._step_s
        if self._allowed_s <= 0:
            return
        began = time.perf_counter()
        with left_out():
            postponed.go_on(self._allowed_s, self.room_bytes(options))
        self._allowed_s -= time.perf_counter() - began

    def end(self, spec: Specialisation, options: Options) -> None:
        """Compare the alternatives that are left; use those that are as exact as they state."""
        if spec.postponed is not None:
            with left_out():
                spec.use_compared(options, self.room_bytes(options))
