"""Errors of the tracer in words a user can act on: which module, why, and the way out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tightfit.allocator.refusals import is_refusal
from tightfit.capture.origins import ModuleTrail
from tightfit.errors import BadInput, CaptureError, InfeasibleBudget
from tightfit.torch_private import core as private


@contextlib.contextmanager
def explained(trail: ModuleTrail) -> Iterator[None]:
    """Turn the tracer's errors into errors that name the module and a way out."""
    try:
        with private.without_meta_log():
            yield
    except (BadInput, InfeasibleBudget, CaptureError):
        raise
    except (private.DataDependentOutputException, private.DynamicOutputShapeException) as error:
        raise CaptureError(
            f"{trail.where(error)} needs the values of a tensor to decide what to run "
            f"({error.func}): a graph cannot hold that. {_WAY_OUT}",
            module=trail.culprit(error),
        ) from error
    except Exception as error:
        if is_refusal(error):  # of a limit that has no room for an opaque module, which runs
            raise
        raise CaptureError(
            _reason(trail.where(error), error), module=trail.culprit(error)
        ) from error


_WAY_OUT = (
    "Way out: express the branch with torch.where, move it into a module of its own (such a "
    "module runs eagerly, as one op), or out of the fitted module"
)


def _reason(where: str, error: Exception) -> str:
    text = str(error).strip().split("\n\n")[0]
    if "Unexpected fake buffer" in text:  # the tracer runs the code twice
        return (
            f"{where}, keeps a tensor that it computes for later calls: a planned step replays "
            "operators, not Python. Way out: compute it in each call, or keep it in a buffer"
        )
    if "convert all Tensors to FakeTensors" in text or "Mixing fake modes" in text:
        return (
            f"{where} uses a tensor that is neither a parameter, a buffer nor an input "
            f"({text[text.find('Found in') :][:160]}). Way out: self.register_buffer(name, "
            "tensor, persistent=False), or pass it as an input"
        )
    if "dynamo-optimized" in text:
        return (
            f"{where} is compiled (torch.compile), so that its operators cannot be planned. Way "
            "out: the plain module, or compile=True of tightfit.fit, which compiles the plan"
        )
    if "local_scalar_dense" in text or "data-dependent" in text.lower():
        return f"{where} reads the value of a tensor in Python ({text[:200]}). {_WAY_OUT}"
    return (
        f"{where} cannot be traced: {type(error).__name__}: {text[:600].rstrip('.')}. Way out: if "
        "plain PyTorch fails, too, look at shapes and types of inputs and targets. If not, mark "
        "the module with tightfit.opaque, which then runs eagerly as one measured op"
    )
