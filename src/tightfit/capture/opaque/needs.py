"""The memory that an opaque module needs, where the budget has no room to measure it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from tightfit.allocator import meter_for
from tightfit.allocator.devices import fixed_generators
from tightfit.allocator.live_on_fakes import LiveOnFakes
from tightfit.allocator.refusals import budget_exceeded, is_refusal, refused_bytes
from tightfit.allocator.resident import granularity_of
from tightfit.capture.calls.geometry import Geometry
from tightfit.capture.opaque.call import OpaqueCall
from tightfit.capture.restored.python_state import PythonState
from tightfit.errors import InfeasibleBudget
from tightfit.torch_private import core as private

_MARGIN = 4
_MARGIN_BYTES = 16 << 10
"""The share of its bytes when stopped that it may lack, where nothing is known."""


class NoRoomToMeasure(InfeasibleBudget):
    """The budget has no room to run an opaque module by itself, as is done once to measure it.

    Nothing has changed: plain PyTorch, which runs it in its turn, may still fit.
    """


@contextlib.contextmanager
def naming_its_needs(call: OpaqueCall) -> Iterator[None]:
    """Where the budget refuses a request of a module, name a budget that has room for it.

    The request that was refused is but the next of many.

    Raises `NoRoomToMeasure` with the bytes of forward and backward of the call, counted on fake
    tensors. It is a quarter more than it had taken where these show less, or where it does not run
    on them.
    """
    if call.device.type != "cpu":  # a GPU's error names the refused and the given bytes itself
        yield
        return
    meter = meter_for(call.device)
    before_bytes = meter.live_bytes()
    try:
        yield
    except RuntimeError as error:
        if not is_refusal(error):
            raise
        taken_bytes = meter.live_bytes() - before_bytes
        taken_bytes += refused_bytes(error)[1]
        needed_bytes = _needed_bytes(call) or 0
        if needed_bytes <= taken_bytes:  # kernels take more than fakes show
            needed_bytes = taken_bytes + taken_bytes // _MARGIN + _MARGIN_BYTES
        message = (
            f"the module {call.title!r} runs as one op, and the budget has no room to run it by "
            "itself, as it must once to be measured."
        )
        found = budget_exceeded(error, message, further_bytes=needed_bytes - taken_bytes)
        call.forget_examples()  # the engine holds the graph of a backward that has failed
        raise NoRoomToMeasure(
            str(found), budget_bytes=found.budget_bytes, minimum_bytes=found.measured_bytes
        ) from error


def _needed_bytes(call: OpaqueCall) -> int | None:
    """Return bytes of a forward and a backward of a call on fakes; None where they fail."""
    try:
        with fixed_generators(call.device), PythonState(call.module):
            return _taken_on_fakes(call)
    except Exception:  # a module of any kind may fail on fakes in any way
        return None


def _taken_on_fakes(call: OpaqueCall) -> int:
    counter = LiveOnFakes(granularity_of(call.device.type))
    with private.FakeTensorMode(allow_non_fake_inputs=True):
        state = {name: torch.empty_like(t, requires_grad=False) for name, t in call.state.items()}
        with counter:
            tensors = [operand.geometry.empty() for operand in call.operands]
            result = call.forward(tensors, state)
            if result.record is not None:
                known = [*tensors, *result.outputs]
                present = [i for i, flag in enumerate(result.differentiable) if flag]
                tangents = [Geometry.of(result.outputs[i]).empty() for i in present]
                saved = [known[i] for i in result.record.saved]
                call.backward(result.record, saved, tangents, present)
    return counter.peak_bytes
