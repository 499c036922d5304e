"""Trace a forward only to find out what the capture of its step must know beforehand."""

from __future__ import annotations

import dataclasses

from tightfit.capture.reads.python_state import PythonState
from tightfit.capture.side_effects.attributes import LeftTensors
from tightfit.capture.side_effects.leftovers import forget_traced, traced_alive
from tightfit.capture.side_effects.outside import AllFound, OutsideTensors
from tightfit.capture.trace.trace import trace
from tightfit.capture.traced_call import TracedCall
from tightfit.errors import CaptureError

__all__ = ["MOST_OUTSIDE", "with_all_outside"]

MOST_OUTSIDE = 64
"""Of such tensors: a forward that makes new ones each time would never come to an end."""


def with_all_outside(call: TracedCall) -> TracedCall:
    """Return a call that knows the outside tensors its forward uses, as far as that can be traced.

    A trace for a plan ends at the first that it meets.

    Raises
    ------
    CaptureError
        If the forward leaves tensors in attributes of its modules.
    """
    outside = call.outside or OutsideTensors(())
    ends = False
    while not ends:
        collecting = outside.collecting()
        ends = _reaches_the_end(dataclasses.replace(call, outside=collecting))
        ends = ends or not collecting.found or len(outside) >= MOST_OUTSIDE
        outside = collecting.with_found()
    return dataclasses.replace(call, outside=outside)


def _reaches_the_end(call: TracedCall) -> bool:
    """Trace a forward; return whether nothing has ended that before.

    The value of a tensor may be asked for that nothing stood for when the trace began.
    """
    state, alive = PythonState(call.modules), traced_alive()
    try:
        with state:
            trace(call)
    except AllFound:
        return True
    except LeftTensors:
        state.raise_if_changed()
        raise
    except CaptureError:
        return False
    finally:
        forget_traced(alive)
    return True
