"""Capturing a step whatever data decides in it: around it, or for the answers of one call."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from tightfit.capture.captured import Captured
from tightfit.capture.origins import module_names
from tightfit.capture.probe import draws_outside_torch, probe, warm_up
from tightfit.capture.reads.names import names_of
from tightfit.capture.reads.python_state import PythonState
from tightfit.capture.side_effects.attributes import KeptTensors
from tightfit.capture.side_effects.outside import OutsideTensors
from tightfit.capture.trace.dry_run import MOST_OUTSIDE, with_all_outside
from tightfit.capture.traced_call import TracedCall
from tightfit.errors import CaptureError, OpaqueChanged, TightfitError
from tightfit.progress import announce

__all__ = [
    "capture_around_data",
    "has_parts",
    "may_be_planned",
    "of_the_same_class",
    "wait_for_traces",
]

_ONE_AT_A_TIME = threading.RLock()
"""The tracer of PyTorch patches classes while it runs: one thread at a time may capture."""
_ASKS_OF_MASKS = nn.TransformerEncoder | nn.TransformerDecoder
"""Modules that ask only whether a mask is the causal one: looked into, and the answer checked."""
_LARGE_SHARE = 0.5  # of the parameters: run as one op, such a module would leave little to plan
_MOST_ATTEMPTS = 8
_ONCE = ("state", "impure")  # what a forward may do only when it first runs


def capture_around_data(
    call: TracedCall,
    capture: Callable[[TracedCall], Captured],
    name: str,
    *,
    keeping: bool = False,
    in_parts: bool = False,
) -> tuple[Captured, TracedCall]:
    """Capture a step, whatever data decides in it.

    An inner module in which computed values decide what runs becomes one op. Where they do in the
    outermost forward, the step is captured for the answers of this call.

    Parameters
    ----------
    capture : callable
        Captures a call for which all that data decides is known.
    name : str
        What is captured, for messages.
    keeping : bool
        Whether tensors that the forward leaves in attributes may become further results.
    in_parts : bool
        Whether a module that holds others is better planned in parts: none becomes one op then,
        and no step is captured for answers.

    Returns
    -------
    captured : Captured
        The step.
    call : TracedCall
        The call as it was captured: with the modules that are one op now, and the answers.

    Raises
    ------
    CaptureError
        If the step cannot be captured otherwise. What the forward raises by itself stays that.
    """
    with _ONE_AT_A_TIME:
        said: list[str] = []  # once it is so: a call that is refused was not planned anyhow
        try:
            found = _captured_around_data(call, capture, name, keeping, in_parts, said)
        except CaptureError as error:
            _raise_what_plain_raises(call, error)
            raise
        for message in said:
            announce(message)
        return found


def wait_for_traces() -> None:
    """Wait until no other thread captures."""
    with _ONE_AT_A_TIME:
        pass


def _raise_what_plain_raises(call: TracedCall, error: CaptureError) -> None:
    """Raise the error of the user's own code, if that is what the tracer met.

    So wrong arguments and shapes fail as without tightfit, and no wrong way out is named.
    """
    met = error.__cause__
    if error.cause or met is None or isinstance(met, TightfitError):
        return
    try:
        probe(call)
    except Exception as plain:
        if type(plain) is not type(met):
            return
        if error.module and hasattr(plain, "add_note"):  # from Python 3.11 on
            plain.add_note(f"(in module {error.module!r})")
        raise plain from None


def _captured_around_data(
    call: TracedCall,
    capture: Callable[[TracedCall], Captured],
    name: str,
    keeping: bool,
    in_parts: bool,
    said: list[str],
) -> tuple[Captured, TracedCall]:
    settled: PythonState | None = None
    attempts = 0
    meets_outside = False
    try:
        while True:
            try:
                if meets_outside:
                    meets_outside, call = False, with_all_outside(call)
                return capture(call), call
            except OpaqueChanged:  # there is room for what it kept next time
                attempts += 1
                if attempts > _MOST_ATTEMPTS:
                    raise
            except CaptureError as error:
                if _goes_around(call, error, in_parts):
                    call, message = _around_data(call, error, name)
                    said += [message] if message else []
                elif error.cause == "outside":
                    if call.outside is None and settled is None and not _is_kept(call):
                        settled, _ = _settled(call)
                    call, meets_outside = _with_outside(call, error), True
                elif error.cause in _ONCE and settled is None and not _is_kept(call):
                    settled, drew = _settled(call)
                    if drew and draws_outside_torch(call):  # each time: no trace would do
                        raise
                elif error.cause in ("state", "hook") and keeping and not _is_kept(call):
                    if settled is not None:  # it is no one-time setting up: as before the call
                        settled.__exit__()
                        settled = None
                    kept = KeptTensors(call.function, call.modules)
                    call = dataclasses.replace(call, function=kept, outside=None)
                else:
                    raise
    except BaseException:
        if settled is not None:
            settled.__exit__()
        raise


def _is_kept(call: TracedCall) -> bool:
    """Whether what a call leaves in attributes is among its traced results."""
    return isinstance(call.function, KeptTensors)


def _settled(call: TracedCall) -> tuple[PythonState, bool]:
    """Let a forward set up what it sets up when it first runs.

    Returns what was before, and whether it drew numbers that no plan can draw.
    """
    before = PythonState(call.modules)
    before.__enter__()
    return before, warm_up(call)


def _goes_around(call: TracedCall, error: CaptureError, in_parts: bool) -> bool:
    """Whether a step is to be captured around what decides in one of its modules.

    One that decides by drawn numbers, such as a stack of layers of which some are left out, is
    better planned in parts if it holds others to be planned by themselves; where the model is
    planned so already, any such module.
    """
    if error.cause not in ("data", "random"):
        return False
    inner = error.module or ""
    if not in_parts and error.cause == "data":
        return True
    if in_parts and (not inner or _share_of_parameters(call.modules, inner) > _LARGE_SHARE):
        return False
    module = module_names(call.modules).get(inner)
    held = list(module.modules())[1:] if module is not None else list(call.modules.values())
    return not any(map(may_be_planned, held))


def _around_data(call: TracedCall, error: CaptureError, name: str) -> tuple[TracedCall, str]:
    """Return the call such that the trace gets past what data decides, and what to say of that.

    Raises the error if nothing helps.
    """
    inner = error.module or ""
    if inner in call.opaque or (not inner and call.answers is not None):
        raise error
    whole = not inner or _share_of_parameters(call.modules, inner) > _LARGE_SHARE
    said = ""
    if whole or isinstance(module_names(call.modules)[inner], _ASKS_OF_MASKS):
        if whole:
            what = f"module {inner!r}, most of {name}," if inner else name
            said = (
                f"what {what} runs depends on values it computes: it is planned for those of this "
                "call. Each step checks them, and another plan is made where they are others"
            )
        call = dataclasses.replace(call, answered=call.answered | {inner})
    else:
        alike = of_the_same_class(call.modules, inner)
        others = f" and {len(alike) - 1} more of its class" if len(alike) > 1 else ""
        said = (
            f"what module {inner!r}{others} runs depends on data: it runs eagerly, as one "
            "measured op of the plan (tightfit.opaque says so beforehand)"
        )
        call = dataclasses.replace(call, opaque=call.opaque | alike)
    found = probe(call)
    answers = found.answers if call.answered else None
    return dataclasses.replace(call, answers=answers, examples=found.examples), said


def _share_of_parameters(modules: Mapping[str, nn.Module], name: str) -> float:
    """Return the share of all parameters that lie in one module."""
    total = sum(p.numel() for m in modules.values() for p in m.parameters())
    own = sum(p.numel() for p in module_names(modules)[name].parameters())
    return own / max(1, total)


def of_the_same_class(modules: Mapping[str, nn.Module], name: str) -> frozenset[str]:
    """Return the names of the modules that run the same code as the one named."""
    named = module_names(modules)
    return frozenset(n for n, m in named.items() if n and type(m) is type(named[name]))


def _with_outside(call: TracedCall, error: CaptureError) -> TracedCall:
    """Return the call with the tensors the trace met that belong to nobody; raise if none did.

    A trace ends at the first of them; most lie in plain attributes that forwards load by name.
    """
    if call.outside is None:
        known = _tensors_in_attributes(call.modules)
        return dataclasses.replace(call, outside=OutsideTensors(known[:MOST_OUTSIDE]))
    if not call.outside.found or len(call.outside) >= MOST_OUTSIDE:
        raise error
    return dataclasses.replace(call, outside=call.outside.with_found())


def _tensors_in_attributes(modules: Mapping[str, nn.Module]) -> list[torch.Tensor]:
    """Return the tensors without gradients in plain attributes that modules' forwards load."""
    found: dict[int, torch.Tensor] = {}
    for module in (module for top in modules.values() for module in top.modules()):
        code = getattr(type(module).forward, "__code__", None)
        for name in names_of(code).attributes & vars(module).keys() if code else ():
            value = vars(module)[name]
            if type(value) is torch.Tensor and value.is_leaf and not value.requires_grad:
                found[id(value)] = value
    return list(found.values())


def has_parts(modules: Mapping[str, nn.Module], root: Any) -> bool:
    """Whether there is something to plan below the outermost forward, on one device."""
    tops = modules.values()
    if len({p.device for top in tops for p in top.parameters()}) > 1:
        return False
    return any(
        may_be_planned(module)
        for top in tops
        for module in top.modules()
        if root is None or module is not top
    )


def may_be_planned(module: nn.Module) -> bool:
    """Whether a module holds others and is trained; the smallest are left as they are."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict | torch.jit.ScriptModule):
        return False
    if type(module).__name__ == "OptimizedModule":
        return False
    return next(module.children(), None) is not None and any(
        p.requires_grad for p in module.parameters()
    )
