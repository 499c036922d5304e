"""Dynamo's result for one frame, and its guards. Private names of torch."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._dynamo.guards import GlobalStateGuard
from torch._dynamo import config, guards, source
from torch._dynamo.output_graph import get_builtins_dict
from torch._guards import ChainedSource, Guard, Source

_RELATIONS = frozenset({"DUPLICATE_INPUT", "GRAD_MODE", "DETERMINISTIC_ALGORITHMS", "GLOBAL_STATE"})
_RELATIONS |= {"TORCH_FUNCTION_STATE", "DEFAULT_DEVICE", "SHAPE_ENV"}
_RELATIONS |= {"AUTOGRAD_SAVED_TENSORS_HOOKS"}
"""Guards on no value: of two values, or of the surroundings, which a file's key holds."""
_OF_TENSORS = ("_dynamo_dynamic_indices", "_dynamo_weak_dynamic_indices")
_OF_TENSORS += ("_dynamo_unbacked_indices", "_dynamo_strict_unbacked_indices")
_OF_TENSORS += ("_dynamo_static_indices",)


class NotReusable(Exception):
    """Dynamo's result for a frame cannot be made again in another process."""


@dataclass(frozen=True)
class GuardOf:
    source: Source  # where its value is found from the frame
    kind: str  # which of Dynamo's guards it is
    # Its other arguments; another source among them for a guard on two
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Frame:
    """Dynamo's result for one frame: one graph, no break."""

    code: types.CodeType  # runs in its place
    guards: tuple[GuardOf, ...]  # its conditions, in the order in which they are made
    sizes: Mapping[Source, tuple[Any, Any]]  # shape and strides of each tensor
    ordered: tuple[Source, ...]  # dicts whose order counts
    imports: Mapping[str, str]  # Python modules by the names under which guards and code find them
    names: tuple[str, str]  # under which the code finds its graph, and guards the builtins
    # All code that was followed; empty where the frame was made again
    traced: tuple[types.CodeType, ...] = ()


def found_in(output: Any) -> Frame:
    """Return Dynamo's result for a frame; the code in its place is not known yet.

    Raises `NotReusable` if something of it means nothing in another process.
    """
    backends = {name for name in output.installed_globals if name.startswith("__compiled_fn")}
    builtins = output.name_of_builtins_dict_key_in_fglobals
    around = output.torch_function_mode_stack, output.functorch_layers, output.aotautograd_guards
    of_sizes = [g.code_list for g in output.guards if g.create_fn_name() == "SHAPE_ENV"]
    if any(around) or output.current_device is not None or output.dual_level != NO_LEVEL:
        raise NotReusable("something is around the call")
    if any(of_sizes) or output.installed_globals - {builtins} != backends or len(backends) != 1:
        raise NotReusable("sizes that change, or objects that code finds by an identity")
    (backend,) = backends
    return Frame(
        code=_NO_CODE,
        guards=tuple(map(_guard_of, sorted(output.guards, key=Guard.sort_key))),
        sizes={
            of: (each["size"], each["stride"])
            for of, each in output.input_source_to_sizes_strides.items()
        },
        ordered=tuple(output.guard_on_key_order),
        imports=dict(output.import_sources),
        names=(backend, builtins),
        traced=tuple(output.tracing_context.traced_code),
    )


NO_LEVEL = -1
_NO_CODE = (lambda: None).__code__


def _guard_of(guard: Guard) -> GuardOf:
    settings = getattr(guard.create_fn, "keywords", {})
    if getattr(guard.create_fn, "args", ()):
        raise NotReusable("a guard with arguments of its own")
    kind = guard.create_fn_name()
    own = {name: value for name, value in settings.items() if (kind, name) != _THE_TENSOR}
    return GuardOf(guard.originating_source, kind, own)


_THE_TENSOR = "TENSOR_MATCH", "value"  # the tensor at its source


def global_state() -> Any:
    """Return the settings of PyTorch that Dynamo guards, as they are now."""
    return GlobalStateGuard().__getstate__()


def configuration() -> str:
    """Return the setup of Dynamo, where that is not the usual one.

    A setting that was put back (`config.patch`) is held as one of the user's, with PyTorch's value.
    """
    held = sorted(config._get_dict(skip_default=True).items())
    return repr([(name, now) for name, now in held if now != config._config[name].default])


# -- values ---------------------------------------------------------------------------------------


def values_of(frame: Any, found: Frame) -> Iterator[tuple[GuardOf, Any]]:
    """Yield the guards on single values, and their values now.

    Raises `NotReusable` if a Python module is not loaded.
    """
    held = {**frame.f_globals, **imported(found), found.names[1]: builtins_of(frame)}
    places = {**guards._get_closure_vars(), "L": frame.f_locals, "G": held}
    seen: dict[Source, Any] = {}
    for guard in found.guards:
        if guard.kind not in _RELATIONS:
            yield guard, _value(guard.source, places, seen)


def _value(of: Source, places: Mapping[str, Any], seen: dict[Source, Any]) -> Any:
    """Return the value at a source, as `Source.get_value` does, without compiling."""
    if of not in seen:
        template = of._name_template
        base = _value(of.base, places, seen) if isinstance(of, ChainedSource) else None
        for field, as_written, found in _READINGS:
            name = getattr(of, field, None)
            if type(name) in (str, int) and template == as_written.format(name):
                seen[of] = found(places, base, name)
                return seen[of]
        seen[of] = eval(template.format("tmp"), {**places, "tmp": base})
    return seen[of]


_READINGS: tuple[tuple[str, str, Callable[[Any, Any, Any], Any]], ...] = (
    ("member", "{{0}}.{}", lambda _, base, name: getattr(base, name)),
    ("index", "{{0}}[{!r}]", lambda _, base, name: base[name]),
    ("local_name", "L[{!r}]", lambda places, _, name: places["L"][name]),
    ("global_name", "G[{!r}]", lambda places, _, name: places["G"][name]),
)
"""Fields of sources, the text of sources with them, and the same without `eval`."""


def imported(found: Frame) -> dict[str, Any]:
    """Return the Python modules that guards and code ask for, by the names they have there.

    Raises `NotReusable` if any of them is not imported.
    """
    missing = [name for name in found.imports.values() if name not in sys.modules]
    if missing:
        raise NotReusable(f"{missing[0]} is not imported")
    return {alias: importlib.import_module(name) for alias, name in found.imports.items()}


def builtins_of(frame: Any) -> dict[str, Any]:
    return get_builtins_dict(frame.f_globals)


def facts_of(guard: GuardOf, value: Any) -> tuple[Any, ...]:
    """Return a guard's condition on its value, as PyTorch's `GuardCheckSpec` of its kind says.

    Raises `NotReusable` if that is unknown, or does not hold.
    """
    spec = guards.GUARD_VALUE_DISPATCH.get(guard.kind)
    if not isinstance(spec, guards.GuardCheckSpec):
        raise NotReusable(f"a guard of the kind {guard.kind}")
    if guard.kind == "CLOSURE_MATCH":
        return ("function", value)
    kind: tuple[Any, ...] = (guard.kind, type(value))
    if guard.kind == "TENSOR_MATCH":
        if any(getattr(value, name, None) for name in _OF_TENSORS):
            raise NotReusable("sizes that are marked")
        keys = torch._C._dispatch_keys(value)
        return (*kind, str(keys), value.is_leaf, *guards.extract_tensor_metadata(value))
    metadata = spec.get_metadata_fn(guard_of(guard), value)
    if not spec.eval_fn(value, metadata):
        raise NotReusable(f"the guard {guard.kind} of {guard.source.name} does not hold")
    return *kind, metadata


def fields_of(of: Source) -> tuple[str, tuple[Any, ...]]:
    """Return the class of a source and its arguments."""
    fields = (getattr(of, f.name) for f in dataclasses.fields(of) if f.init)
    return type(of).__name__, tuple(fields)


def source_of(kind: str, fields: tuple[Any, ...]) -> Source:
    """Return the source of a class that is made with certain fields.

    Raises `NotReusable` if there is no such class.
    """
    found = getattr(source, kind, None)
    if not (inspect.isclass(found) and issubclass(found, Source)):
        raise NotReusable(f"a source of the kind {kind}")
    return found(*fields)


def guard_of(guard: GuardOf) -> Guard:
    create = getattr(guards.GuardBuilder, guard.kind)
    if guard.settings:
        create = functools.partial(create, **guard.settings)
    return Guard(guard.source, create)
