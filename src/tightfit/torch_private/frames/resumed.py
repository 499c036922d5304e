"""Functions that go on after a graph break, called once the frame before has ended.

Dynamo ends a frame at a graph break by a call of a function that goes on, and each of these ends so
in its turn. All of them hold their arguments until the last has returned: every tensor that was
alive at a break stays alive, where Python would have freed it. Private names of torch.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo import bytecode_transformation as bytecode
from torch._dynamo.symbolic_convert import InstructionTranslatorBase

from tightfit.torch_private.patches import Patch


class _Next:
    """What a frame that was called by `run_rest` returns at a graph break: the next call."""

    __slots__ = ("arguments", "function")

    def __init__(self, function: Callable[..., Any], arguments: list[Any]) -> None:
        self.function, self.arguments = function, arguments


@torch._dynamo.decorators.skip
def run_rest(function: Callable[..., Any], arguments: list[Any]) -> Any:
    """Run the function that goes on after a graph break, and those after it, one by one.

    `arguments`: of the function; they are taken out, so that the frame that calls holds none.
    """
    caller = sys._getframe(1).f_back
    if caller is not None and caller.f_code is run_rest.__code__:
        return _Next(function, arguments)
    del caller
    while True:
        taken = tuple(arguments)
        arguments.clear()
        result = function(*taken)
        del taken
        if type(result) is not _Next:
            return result
        function, arguments = result.function, result.arguments
        del result


@contextlib.contextmanager
def ending_frames_at_breaks() -> Iterator[None]:
    """Have Dynamo end a frame at a graph break before it calls the function that goes on."""
    if not hasattr(InstructionTranslatorBase, _CALL_NAME):
        yield
        return
    with _CALL_OF_REST.by(_leaving_the_call):
        yield


def _leaving_the_call(generate: Callable[..., None], codes: Any, names: Any, made: Any) -> None:
    """Have generated code hand function and arguments to `run_rest`, in place of the call."""
    generate(codes, names, made)
    call = bytecode.create_call_function_ex(False, True)
    written = made.get_instructions()
    if [each.opname for each in written[-len(call) :]] != [each.opname for each in call]:
        return
    del written[-len(call) :]
    made.load_import_from(__name__, run_rest.__name__)
    made.extend_output(bytecode.create_rot_n(3))
    made.extend_output(bytecode.create_call_function(2, True))


_CALL_NAME = "codegen_call_resume"
_CALL_OF_REST = Patch(InstructionTranslatorBase, _CALL_NAME)
