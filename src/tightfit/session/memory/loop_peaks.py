"""The peaks of a training loop: of its steps, and of code between them.

That code loads data, evaluates, and trains models that are not fitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from tightfit.allocator import own_meter_for
from tightfit.allocator.resident import is_part
from tightfit.allocator.tally import CpuTally, Tally
from tightfit.execution.guard import leave_out_of
from tightfit.living import Living

_LEARNED = 2  # steps whose peak is measured


class LoopPeaks:
    """The peaks of a loop: of its steps, and of code between them.

    Code between steps runs from the step of an optimizer to the next call of anything fitted. It
    rises above the memory held as it begins. Until it is measured, code before the first call
    counts: the batch that it made, and as much again while it made it.

    `tally`: counts memory, maybe since before there was anything fitted. `step_peak_bytes`: the
    most that a step has held so far, with the optimizers' state that was still to come; 0: none was
    seen to its end.
    """

    def __init__(self, device: torch.device, tally: Tally | None) -> None:
        self._tally = tally
        self._meter = own_meter_for(device)
        self._expected_bytes = 0
        self._seen_bytes: int | None = None
        self._is_first = self._is_running = True
        self.step_peak_bytes = self._steps = 0
        self._held_bytes = self._begin_bytes = 0
        self._most_bytes = self._earlier_peak_bytes()
        _ALL.add(self)
        leave_out_of(self)

    @property
    def rise_bytes(self) -> int:
        """How far code between steps has risen; 0 where all code reads one peak, as on a GPU."""
        return self._expected_bytes if self._seen_bytes is None else self._seen_bytes

    @property
    def needed_bytes(self) -> int:
        """The bytes that code between steps will probably need; 0: it does not run now."""
        return self._held_bytes + self.rise_bytes if self._is_running else 0

    def step_begins(
        self, held_bytes: int, makes_state: Callable[[], bool], coming_bytes: Callable[[], int]
    ) -> None:
        """Note that an optimizer of the parameters steps.

        `held_bytes`: all that counts against the limit now. `makes_state`: returns whether this
        step makes the optimizer's state: then the code after it is not measured. `coming_bytes`:
        returns the state to come of all optimizers within the limit.
        """
        if self._meter is None or self._is_running:
            return
        if self._steps < _LEARNED:
            self._steps += 1
            peak_bytes = held_bytes + self.take_peak() - self._meter.live_bytes()
            self.step_peak_bytes = max(self.step_peak_bytes, peak_bytes + coming_bytes())
        self._held_bytes, self._is_running = held_bytes, True
        self._begin_bytes = -1 if makes_state() else self._meter.live_bytes()
        self._meter.reset_peak()
        self._most_bytes = 0

    def call_begins(self, inputs: Iterable[Any]) -> None:
        """Note that something fitted is called."""
        if self._meter is not None and self._is_first and self._tally is not None:
            whole = [x for x in inputs if isinstance(x, torch.Tensor) and not is_part(x)]
            self._expected_bytes = self._tally.counted_bytes(whole)
            temporary_bytes = self.take_peak() - self._meter.live_bytes()
            self._expected_bytes += min(temporary_bytes, self._expected_bytes)
        for each in _ALL.now():
            each._end()

    def _earlier_peak_bytes(self) -> int:
        """Return the peak since the tally began, unless a step may have run meanwhile."""
        if self._meter is None or not isinstance(self._tally, CpuTally) or self._tally.limit:
            return 0
        begin_bytes = self._meter.live_bytes() - self._tally.allocated_bytes()
        return begin_bytes + self._tally.take_peak_bytes()

    def _end(self) -> None:
        if not self._is_running:
            return
        rise_bytes = self.take_peak() - self._begin_bytes
        if not self._is_first and self._begin_bytes >= 0:
            self._seen_bytes = max(rise_bytes, self._seen_bytes or 0)
        self._is_first = self._is_running = False
        self._most_bytes = 0

    def take_peak(self) -> int:
        """Return the most that was allocated since this code, or the step, began."""
        if self._meter is not None:
            self._most_bytes = max(self._most_bytes, self._meter.take_peak_bytes())
        return self._most_bytes

    def skip_peak(self) -> None:
        """Leave out what was allocated since the peak was last taken."""
        if self._meter is not None:
            self._meter.reset_peak()


_ALL: Living[LoopPeaks] = Living()
