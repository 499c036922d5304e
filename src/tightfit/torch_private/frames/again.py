"""The stored result of a frame is used before Dynamo converts it. Private names of torch.

Guards are made again from the values of the process that asks: none of PyTorch's are read from a
file, whose identities would mean nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch._C._dynamo.guards import GlobalStateGuard
from torch._dynamo import bytecode_transformation, convert_frame, guards, utils
from torch._dynamo.output_graph import OutputGraphCommon, OutputGraphGuardsState
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.types import ConvertFrameReturn, GuardedCode, wrap_guarded_code
from torch._guards import CompileContext, GuardsSet, compile_context
from torch.fx.experimental.symbolic_shapes import _ShapeGuardsHelper
from torch.utils._ordered_set import OrderedSet

from tightfit.torch_private.frames.found import (
    NO_LEVEL,
    Frame,
    NotReusable,
    builtins_of,
    found_in,
    guard_of,
    imported,
)


class KeptFrames(Protocol):
    """A store that keeps frames for other processes."""

    def key(self, frame: Any) -> str | None:
        """Return the key of a frame; None if it is not to be kept."""

    def find(self, key: str, frame: Any) -> tuple[Frame, Callable[..., Any]] | None:
        """Return the kept result for a frame and a callable of its graph, if all guards hold."""

    def keep(self, key: str, frame: Any, found: Frame, graph: Any) -> None:
        """Keep the result for a frame; the graph is the backend's result."""


class _RecordingBackend:
    """A backend that notes Dynamo's knowledge of the frame of a graph.

    Dynamo never frees a backend: this backend keeps neither frames nor modules alive.
    """

    def __init__(self, backend: Callable[..., Any]) -> None:
        self._backend = backend
        self._notes = False
        self.made: list[tuple[Any, Any]] = []  # while Dynamo follows a frame

    def __call__(self, module: Any, examples: Any) -> Any:
        made = self._backend(module, examples)
        if self._notes:
            self.made.append((InstructionTranslator.current_tx().output, made))
        return made

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        self._notes = True
        try:
            yield
        finally:
            self._notes = False
            self.made.clear()


class ReusingConversion:
    """Dynamo's conversion of a frame, where nothing is kept of it that holds.

    `kept`: is asked first, and updated afterwards.
    """

    def __init__(self, backend: Callable[..., Any], kept: KeptFrames | None) -> None:
        self.backend = _RecordingBackend(backend)
        self._kept = kept
        self._convert: Any = None
        self.is_asked = True

    def replace_converter(self, converting: Any) -> None:
        """Take the place of Dynamo's converter of frames that are not skipped."""
        if self._kept is not None:
            self._convert, converting._inner_convert = converting._inner_convert, self

    def __getattr__(self, name: str) -> Any:
        """Be as the conversion in whose place this is."""
        return getattr(self._convert, name)

    def __call__(self, frame: Any, entry: Any, hooks: Any, state: Any, **others: Any) -> Any:
        """Return the kept result for a frame, or Dynamo's."""
        assert self._kept is not None
        key = self._kept.key(frame) if self.is_asked else None
        if key is None:
            return self._convert(frame, entry, hooks, state, **others)
        kept = self._kept.find(key, frame)
        again = _made_again(frame, *kept, state) if kept is not None else None
        if again is not None:
            return again
        found: list[tuple[Frame, Any]] = []
        telling = dataclasses.replace(hooks, guard_export_fn=functools.partial(self._end, found))
        with self.backend.noting():
            result = self._convert(frame, entry, telling, state, **others)
        for seen, graph in found if result.guarded_code is not None else ():
            whole = dataclasses.replace(seen, code=result.guarded_code.code)
            self._kept.keep(key, frame, whole, graph)
        return result

    def _end(self, found: list[tuple[Frame, Any]], guards_: GuardsSet) -> None:
        """Note Dynamo's result for a frame, before it forgets."""
        for output, graph in self.backend.made[-1:]:
            if output.guards is guards_:
                with contextlib.suppress(NotReusable):
                    found.append((found_in(output), graph))


def _made_again(
    frame: Any, found: Frame, graph: Callable[..., Any], state: Any
) -> ConvertFrameReturn | None:
    """Return the result that Dynamo would have for a frame; None if a guard does not hold."""
    held = frame.f_globals
    backend, builtins = found.names
    held.update(imported(found))
    graph = torch._dynamo.disable(graph, reason="it is a graph that Dynamo has handed over")
    cleanups = [
        utils.CleanupHook.create(held, name, value)
        for name, value in ((backend, graph), (builtins, builtins_of(frame)))
    ]
    number = convert_frame.get_compile_id(state)
    try:
        with compile_context(CompileContext(number)):
            manager = _guards_of(frame, found)
    except Exception:
        manager = None
    if manager is None or not manager.check(frame.f_locals):
        for undo in cleanups:
            undo()
        return None
    utils.CleanupManager.instance[found.code] = cleanups
    utils.orig_code_map[found.code] = frame.f_code
    convert_frame.output_codes.add(found.code)
    return wrap_guarded_code(GuardedCode(found.code, manager, number, f"kept frame {number}"))


def _guards_of(frame: Any, found: Frame) -> Any:
    nothing = _ShapeGuardsHelper([])
    state = OutputGraphGuardsState(
        local_scope=frame.f_locals,
        global_scope=frame.f_globals,
        torch_function_mode_stack=[],
        guard_on_key_order=set(found.ordered),
        input_source_to_sizes_strides={
            of: {"size": size, "stride": stride} for of, (size, stride) in found.sizes.items()
        },
        dual_level=NO_LEVEL,
        functorch_layers=[],
        current_device=None,
        global_state_guard=GlobalStateGuard(),
        _guards=GuardsSet(OrderedSet(map(guard_of, found.guards))),
        _aotautograd_guards=[],
        skip_guards_check=True,
        name_of_builtins_dict_key_in_fglobals=found.names[1],
    )
    return guards.CheckFunctionManager(
        frame.f_code,
        OutputGraphCommon(state),
        shape_code_parts=guards.ShapeCodeParts(nothing, nothing, None, True, []),
    ).guard_manager


def unique_names() -> tuple[str, str]:
    """Return names under which nothing is found yet: of a graph, and of the builtins."""
    unique = bytecode_transformation.unique_id
    return unique("__compiled_fn", with_uuid=True), unique("__builtins_dict__")
