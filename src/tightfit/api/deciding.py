"""Run a step whose data decide what runs: change over to the plan they ask for."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from tightfit.capture.probe import probe
from tightfit.capture.side_effects.generators import GeneratorStates
from tightfit.errors import CaptureError, Diverged, OpaqueChanged
from tightfit.execution.guard import announce
from tightfit.session.whole.learning import watch

if TYPE_CHECKING:
    from tightfit.session.whole.specialisation import Shape
    from tightfit.session.whole.steps import Session

__all__ = ["run_as_data_decide"]

_MOST_ATTEMPTS = 8


def run_as_data_decide(
    session: Session, shape: Shape, leaves: list[Any], args: Any, kwargs: Any
) -> tuple[Shape, list[Any]]:
    """Run a forward; where its data ask for another plan than expected, run that one.

    A forward that ends early has changed nothing: buffers are written at its end, and generators
    are put back.

    Returns
    -------
    shape : Shape
        What was run in the end.
    outputs : list
        Its flattened outputs.
    """
    for _ in range(_MOST_ATTEMPTS):
        joint = shape.captured.joint
        if not joint.questions and not joint.opaque.blocks:
            return shape, session.run(shape, leaves)
        before = GeneratorStates(session.modules)
        try:
            return shape, session.run(shape, leaves)
        except (OpaqueChanged, Diverged) as change:
            if joint.opaque.changes_state:  # a block writes its buffers when it runs
                raise
            more = str(change) if isinstance(change, OpaqueChanged) else None
        before.restore()
        if more is not None:
            session.shapes.pop(shape.key, None)
            announce(more)
            shape = session.shape_for(shape.key, args, kwargs)
        else:
            shape = _shape_answering(session, shape, args, kwargs)
    raise CaptureError(
        f"what {session.name} runs is decided otherwise each time it is run with the same inputs: "
        "that cannot be planned. Way out: move what decides out of the fitted module"
    )


def _shape_answering(session: Session, unfit: Shape, args: Any, kwargs: Any) -> Shape:
    """Return what was captured for what data decide now; capture it the first time."""
    call = session.traced_call(unfit.key, args, kwargs)
    found = probe(call)
    for shape in session.shapes.get(unfit.key, ()):
        if shape is not unfit and shape.captured.joint.answers == found.answers:
            shape.used = session.calls
            return shape
    announce(f"{session.name} computes values that decide otherwise: making a new plan")
    call = dataclasses.replace(call, answers=found.answers, examples=found.examples)
    shape = session.new_shape(unfit.key, call)
    watch(session, shape)
    return shape
