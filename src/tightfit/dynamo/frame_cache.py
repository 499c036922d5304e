"""The frame cache: Dynamo's result for a frame, kept in a file for other processes.

A file is named for arguments of a frame and for values that its guards check. Where all of that is
the same, Dynamo's code and its graph serve again, and the guards are made of the values of this
process. Where anything differs, Dynamo follows the Python again.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from tightfit.capture.calls.signature import tensor_signature
from tightfit.capture.origins import module_names
from tightfit.capture.recall.installation import installation, memory_of, sees_operators
from tightfit.capture.recall.trace_files import (
    ignoring_errors,
    note_use,
    read_trace,
    trace_folder,
    write_trace,
)
from tightfit.capture.recall.values import NotKept, digest, packed, unpacked
from tightfit.dynamo.backend import DynamoGraph, HandOver
from tightfit.dynamo.packing import KeptHandedGraph, graph_again, kept_graph
from tightfit.dynamo.tokens import Tokens, digest_of, files_of
from tightfit.torch_private import core as private
from tightfit.torch_private import traces
from tightfit.torch_private.frames import found as frames
from tightfit.torch_private.frames.again import unique_names
from tightfit.torch_private.settings import global_settings

_FORMAT = 4
_SUFFIX = ".frame.gz"
_MOST_ALIKE = 4  # with alike arguments, different by guards


class KeptFrame(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a file: see `tightfit.torch_private.frames.Frame`."""

    format: int
    asked: str  # a digest of values that guards check
    files: list[Any]  # of installed code that was followed: size and date
    code: bytes
    # Classes and fields; a source inside another stands in its fields as a place in this list
    sources: list[tuple[str, list[Any]]]
    guards: list[tuple[int, str, dict[str, Any]]]
    sizes: list[tuple[int, Any, Any]]
    ordered: list[int]
    imports: dict[str, str]
    names: tuple[str, str]
    trains: bool
    graph: KeptHandedGraph


class FrameCache:
    """Keeps Dynamo's results for the frames of a callable, and finds them again.

    `hand_over`: given a graph, returns a callable that runs it where a backward may follow.
    """

    def __init__(self, modules: Mapping[str, nn.Module], hand_over: HandOver) -> None:
        self._modules = modules
        self._hand_over = hand_over

    def key(self, frame: Any) -> str | None:
        with ignoring_errors("Dynamo's results are not kept"):
            return digest(packed(self._described(frame)))
        return None

    def find(self, key: str, frame: Any) -> tuple[frames.Frame, Callable[..., Any]] | None:
        files = trace_folder().glob(f"{key}-*{_SUFFIX}")
        for path in sorted(files, key=lambda path: path.stat().st_mtime_ns)[-_MOST_ALIKE:]:
            with ignoring_errors(f"{path} is not used"):
                kept = read_trace(path, KeptFrame, _FORMAT)
                found = _unpacked(kept)
                if _guard_digest(frame, found, Tokens()) == kept.asked and _unchanged(kept.files):
                    graph = graph_again(kept.graph, module_names(self._modules))
                    note_use(path)
                    return found, DynamoGraph(graph, self._hand_over, trains=kept.trains)
        return None

    def keep(self, key: str, frame: Any, found: frames.Frame, graph: DynamoGraph) -> None:
        """Keep the result for a frame, if it means anything in another process."""
        with ignoring_errors("Dynamo's results are not kept"):
            tokens = Tokens()
            asked = _guard_digest(frame, found, tokens)
            tokens.cover(found.traced)
            record = KeptFrame(
                format=_FORMAT,
                asked=asked,
                files=files_of(found.traced),
                trains=graph.trains,
                graph=kept_graph(graph.handed, module_names(self._modules)),
                **_packed(found),
            )
            write_trace(trace_folder() / f"{key}-{asked[:16]}{_SUFFIX}", record)

    def _described(self, frame: Any) -> tuple[Any, ...]:
        """Return arguments and surroundings of a frame, as plain values.

        Raises `NotKept` if something is around that looks into running code.
        """
        if sees_operators():
            raise NotKept("a mode of PyTorch, or hooks of all modules")
        inside = module_names(self._modules)
        kinds = tuple(dict.fromkeys(map(type, inside.values())))
        replaced = [(n, getattr(held, "__qualname__", "")) for n, held in traces.patched(kinds)]
        names = {id(module): name for name, module in inside.items()}
        tensors = {f"{name}.{key}": t for name, m in inside.items() for key, t in _held_by(m)}
        leaves = private.pytree.tree_leaves(frame.f_locals)
        given = [*tensors.values(), *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))]
        first = {id(tensor): i for i, tensor in reversed([*enumerate(given)])}
        return (
            _FORMAT,
            *installation(given),
            frames.configuration(),
            str(frames.global_state()),
            packed(global_settings()),
            replaced,
            (digest_of(frame.f_code), [*frame.f_locals]),
            [_leaf_token(leaf, names) for leaf in leaves],
            [(name, m.training, type(m).__qualname__) for name, m in inside.items()],
            [*tensors],
            [(*tensor_signature(tensor), first[id(tensor)]) for tensor in given],
            memory_of(given),
        )


def _held_by(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for holder in (module._parameters, module._buffers):
        yield from ((name, tensor) for name, tensor in holder.items() if tensor is not None)


def _leaf_token(leaf: Any, names: Mapping[int, str]) -> str:
    """Return a value that tells an argument from others, as far as guards do not."""
    plain = (bool, int, float, str, type(None))
    inner = getattr(leaf, "__self__", leaf)
    name = names.get(id(inner), getattr(leaf, "__qualname__", ""))
    return f"{type(leaf).__name__} {name} {leaf if isinstance(leaf, plain) else ''}"


def _guard_digest(frame: Any, found: frames.Frame, tokens: Tokens) -> str:
    """Return a digest of values that guards check, as they are now."""
    return digest([tokens.of(frames.facts_of(*each)) for each in frames.values_of(frame, found)])


def _unchanged(files: list[Any]) -> bool:
    paths = [Path(name) for name, *_ in files]
    return files == [[str(p), p.stat().st_size, p.stat().st_mtime_ns] for p in paths]


def _packed(found: frames.Frame) -> dict[str, Any]:
    places: dict[Any, int] = {}
    sources: list[tuple[str, list[Any]]] = []

    def place(of: Any) -> int:
        if of not in places:
            kind, fields = frames.fields_of(of)
            sources.append((kind, [field(each) for each in fields]))
            places[of] = len(sources) - 1
        return places[of]

    def field(value: Any) -> Any:
        return ["source", place(value)] if isinstance(value, frames.Source) else packed(value)

    return {
        "code": marshal.dumps(found.code),
        "guards": [
            (place(g.source), g.kind, {name: field(value) for name, value in g.settings.items()})
            for g in found.guards
        ],
        "sizes": [(place(of), *map(packed, sizes)) for of, sizes in found.sizes.items()],
        "ordered": [place(of) for of in found.ordered],
        "imports": dict(found.imports),
        "names": found.names,
        "sources": sources,
    }


def _unpacked(kept: KeptFrame) -> frames.Frame:
    """Return the result for a frame; its names are not used here."""
    names = unique_names()
    new = dict(zip(kept.names, names, strict=True))
    sources: list[Any] = []

    def field(value: Any) -> Any:
        if isinstance(value, list) and value[0] == "source":
            return sources[value[1]]
        return new.get(value, value) if isinstance(value, str) else unpacked(value)

    for kind, fields in kept.sources:
        sources.append(frames.source_of(kind, tuple(map(field, fields))))
    code = marshal.loads(kept.code)
    return frames.Frame(
        code=code.replace(co_names=tuple(new.get(name, name) for name in code.co_names)),
        guards=tuple(
            frames.GuardOf(sources[i], kind, {name: field(v) for name, v in settings.items()})
            for i, kind, settings in kept.guards
        ),
        sizes={sources[i]: (unpacked(size), unpacked(stride)) for i, size, stride in kept.sizes},
        ordered=tuple(sources[i] for i in kept.ordered),
        imports=kept.imports,
        names=names,
    )
