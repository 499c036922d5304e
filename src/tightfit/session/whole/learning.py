"""Measuring the steps of a session, and learning from them what nobody told it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tightfit.execution.guard import Guard
from tightfit.graph.fingerprint import fingerprint
from tightfit.graph.ir import Graph
from tightfit.progress import announce
from tightfit.session.memory.account import device_of_modules, gradient_bytes
from tightfit.session.processes import agreed
from tightfit.session.whole.compiling import still_fits
from tightfit.session.whole.planning import held_gradient_bytes, state_bytes
from tightfit.units import format_bytes

if TYPE_CHECKING:
    from tightfit.session.whole.specialisation import Shape
    from tightfit.session.whole.steps import Session

__all__ = ["watch"]


def watch(session: Session, shape: Shape) -> None:
    """Begin to measure a step."""
    graph = shape.captured.graph
    if session.guard is None:
        session.guard = Guard(
            session.budget_bytes(),
            str(device_of_modules(session.modules)),
            session.options.on_exceed,
            constants=lambda: _constant_bytes(session, shape.captured.graph),
        )
    session.guard.constants = lambda: _constant_bytes(session, graph)
    session.guard.before_forward()
    session.guard.budget_bytes = session.budget_bytes()
    _learn(session, shape)


def _constant_bytes(session: Session, graph: Graph) -> int:
    """Return what is resident now: the graph's constants, gradients, optimizer state."""
    optimizer = session.options.optimizer
    if optimizer is not None and not any(optimizer.state.values()):
        state = 0
    elif optimizer is None:
        state = session.seen_state_bytes or 0
    else:
        state = state_bytes(session, graph)
    return graph.constant_bytes + held_gradient_bytes(session, graph) + state


def _learn(session: Session, shape: Shape) -> None:
    """Replace assumptions by what the first step showed; plan again if that matters."""
    guard = session.guard
    if guard is None or not guard.steps or session.last is None:
        return
    step = guard.steps[-1]
    if not session.reported:
        session.reported = True
        _report(session, step.program_bytes, step.peak_bytes)
        if session.options.optimizer is None and not _has_company(session):
            _learn_state(session, shape, guard)
    if _has_company(session):
        return  # what lies between forward and backward is theirs, too
    if not shape.outside_known and shape.plans:
        shape.outside_known = True
        outside_bytes = _agreed(session, shape, "outside", step.outside_bytes)
        shape.seen_outside_bytes = outside_bytes
        if not still_fits(
            session.last,
            session.budget_bytes(),
            assumed_bytes=shape.outside_bytes,
            outside_bytes=outside_bytes,
        ):
            shape.outside_bytes = outside_bytes
            announce(
                f"user code holds {format_bytes(outside_bytes)} between forward and "
                "backward: planning with that"
            )


def _has_company(session: Session) -> bool:
    """Whether other members of a shared budget may run within this one's step."""
    shared = session.options.shared
    return shared is not None and len(shared.members()) > 1


def _learn_state(session: Session, shape: Shape, guard: Guard) -> None:
    """See what the first step left behind: the optimizer's state, if nobody told its size."""
    granularity = shape.captured.graph.device.granularity_bytes
    grown = guard.growth_bytes - gradient_bytes(session.modules, granularity)
    if session.replicas is not None:
        grown += session.replicas.viewed_bytes(granularity)  # were there before the step
    session.seen_state_bytes = _agreed(session, shape, "state", max(0, grown))
    announce(
        f"{format_bytes(session.seen_state_bytes)} of optimizer state and other lasting memory "
        "appeared in the first step: planning with that"
    )


def _agreed(session: Session, shape: Shape, what: str, own_bytes: int) -> int:
    """Return what the first rank measured, but at least the own: all then plan alike."""
    key = f"{what} bytes {fingerprint(shape.captured.graph)}"
    return max(own_bytes, agreed(session.options.ranks, key, int, lambda: own_bytes))


def _report(session: Session, program_bytes: int, peak_bytes: int) -> None:
    assert session.guard is not None and session.last is not None
    planned = session.last.outcome.peak_bytes
    held = session.guard.meter.held_bytes() if session.guard.meter is not None else 0
    announce(
        f"{session.name}: planned peak {format_bytes(planned)}, measured "
        f"{format_bytes(program_bytes)}; whole step {format_bytes(peak_bytes)} of a budget of "
        f"{format_bytes(session.guard.budget_bytes)}; the process holds {format_bytes(held)} "
        "(fragmentation is not bounded yet)"
    )
