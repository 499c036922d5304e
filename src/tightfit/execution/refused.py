"""The errors of a refused backward of a planned call."""

from __future__ import annotations

from tightfit.capture.joint_graph import Source
from tightfit.errors import WITHOUT_A_PLAN, TightfitError


def looks_at_parts() -> TightfitError:
    """Return the error for a hook or a derivative that asks for a part of a gradient."""
    return TightfitError(
        "an output has a hook on its gradient, is to keep it (retain_grad), or another is "
        "differentiated by it, and other outputs of the same planned step are computed from it. "
        "That part of its gradient never leaves the step. Way out: return only one of them, or "
        f"compute the other outside. {WITHOUT_A_PLAN}"
    )


def second_time(*, is_freed: bool) -> TightfitError:
    """Return the error that a second backward came.

    `is_freed`: whether the first was to keep the saved tensors (retain_graph).
    """
    why, first = "", "say retain_graph=True to the first, "
    if is_freed:
        why = (
            ", even with retain_graph=True: its parameters are spread over processes (fully_shard) "
            "and are not there any more"
        )
        first = ""
    return TightfitError(
        "backward ran through a tightfit step a second time, but its activations are "
        f"freed by the first{why}. Way out: {first}call the model again, or sum the "
        f"losses and call backward once. {WITHOUT_A_PLAN}"
    )


def differentiated() -> TightfitError:
    return TightfitError(
        "tightfit cannot differentiate through its backward (create_graph=True) where parameters "
        "are spread over processes (fully_shard): leave the part that needs double backward out "
        f"of the fitted module, or tightfit.unfit(model) first. {WITHOUT_A_PLAN}"
    )


def changed(source: Source | None, shape: tuple[int, ...]) -> TightfitError:
    """Return the error that a tensor was changed between forward and backward.

    `source`: the placeholder that it is; None: it is none.
    """
    name = f"a tensor that the forward returned or was given (shape {shape})"
    way_out = "change parameters after backward, and clone outputs before changing them"
    if source is not None and source.kind == "input":
        name = f"{source.name} (shape {shape})"
        way_out = "give the model a copy of it (x.clone()), or change a copy"
    elif source is not None:
        name = f"{source.kind} {source.name}"
        way_out = "change it after backward"
    return TightfitError(
        f"{name} was changed in place between forward and backward, and the plan computes "
        f"freed values from it again: gradients would be wrong. Way out: {way_out}. "
        f"{WITHOUT_A_PLAN}"
    )


def changed_during(name: str) -> TightfitError:
    return TightfitError(
        f"{name} was changed during backward "
        "(by a hook or an optimizer that steps there) while the plan still reads it. "
        "Step after backward, or raise the budget so that less is recomputed"
    )
