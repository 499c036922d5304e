"""A traced step as a record for a file, and the traced step that a record describes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import fx, nn

from tightfit.capture.calls.structure import Structure
from tightfit.capture.decisions.reads import Decisions
from tightfit.capture.joint_graph import JointGraph, Source
from tightfit.capture.opaque.call import OpaqueModules
from tightfit.capture.operators.checkpoints import Checkpoints
from tightfit.capture.origins import BySequence, Origins
from tightfit.capture.recall.values import NotKept, bytes_of, packed, unpacked
from tightfit.torch_private import core as private
from tightfit.torch_private import traces, wrappers

_NOTES = (
    "seq_nr",
    "partitioner_tag",
    "tightfit_random",
    "tightfit_forward",
    "tightfit_call",
    "tightfit_terms",
)
_LARGEST_CONSTANT = 1 << 16
_NO_MODULES = OpaqueModules((), False)


class KeptTensor(msgspec.Struct, frozen=True, array_like=True):
    """The memory layout of a tensor of the trace, and how its numbers are read."""

    storage: int  # its storage; they count from 0
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    requires_grad: bool
    is_conjugated: bool
    is_negated: bool


class KeptNode(msgspec.Struct, frozen=True, array_like=True):
    """A node of the trace; its values are numbers of tensors, None, or packed."""

    # op, name: as `torch.fx` has them
    op: str
    name: str
    # target, args, kwargs: packed
    target: Any
    args: Any
    kwargs: Any
    values: list[int | None] | int | None  # the numbers of the tensors that it makes
    notes: dict[str, Any]  # its notes, packed


class KeptConstant(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that the forward makes of numbers of its own."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    content: bytes


class KeptGraph(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    storages: list[tuple[int, str]]
    tensors: list[KeptTensor]
    constants: list[KeptConstant]
    nodes: list[KeptNode]
    placeholders: list[int]
    sources: Any
    write_backs: Any
    raw_outputs: Any
    metadata: Any
    gradients: Any
    structure: Any
    modules: Any
    regions: Any
    decisions: Any
    detached: Any
    checkpoints: str


def kept_graph(joint: JointGraph) -> KeptGraph:
    """Return the record of a traced step that is not normalised yet.

    Raises `NotKept` if it holds values that no file can give back: opaque modules, numbers.
    """
    if joint.opaque != _NO_MODULES or joint.structure.numbers:
        raise NotKept("modules that run eagerly, or numbers")
    return _Packing(joint).record()


class _Packing:
    def __init__(self, joint: JointGraph) -> None:
        self._joint = joint
        self._nodes = {node: i for i, node in enumerate(joint.module.graph.nodes)}
        self._tensors: dict[int, int] = {}
        self._kept: list[KeptTensor] = []
        self._storages: dict[int, int] = {}
        self._sizes: list[tuple[int, str]] = []

    def record(self) -> KeptGraph:
        joint = self._joint
        nodes = [self._node(node) for node in self._nodes]
        decisions = joint.decisions
        return KeptGraph(
            storages=self._sizes,
            tensors=self._kept,
            constants=[self._constant(n) for n in self._nodes if n.op == "get_attr"],
            nodes=nodes,
            placeholders=[self._nodes[node] for node in joint.placeholders],
            sources=packed(tuple((s.kind, s.name, s.index, s.has_history) for s in joint.sources)),
            write_backs=packed(joint.write_backs, self._nodes),
            raw_outputs=packed(joint.raw_outputs, self._nodes),
            metadata=packed(wrappers.facts_of(joint.metadata)),
            gradients=packed(joint.gradients, self._nodes),
            structure=packed(tuple(vars(joint.structure).values())),
            modules=packed((joint.origins.modules.starts, joint.origins.modules.values)),
            regions=packed((joint.origins.regions.starts, joint.origins.regions.values)),
            decisions=packed(
                (decisions.steps, dict(decisions.leaves), decisions.copied, decisions.shared)
            ),
            detached=packed(joint.detached),
            checkpoints=joint.checkpoints.name,
        )

    def _node(self, node: fx.Node) -> KeptNode:
        if node.op not in ("placeholder", "call_function", "get_attr", "output"):
            raise NotKept(f"a node that is {node.op}")
        is_pick = node.target is operator.getitem
        target = node.target if isinstance(node.target, str) else None
        return KeptNode(
            node.op,
            node.name,
            "getitem" if is_pick else packed(node.target) if target is None else target,
            packed(node.args, self._nodes),
            packed(node.kwargs, self._nodes),
            self._values(node),
            {note: packed(node.meta[note]) for note in _NOTES if note in node.meta},
        )

    def _values(self, node: fx.Node) -> list[int | None] | int | None:
        value = node.meta.get("val")
        if isinstance(value, tuple | list):
            if type(value) not in (tuple, list):
                raise NotKept(f"results in a {type(value).__name__}")
            return [-1 if type(value) is tuple else -2, *map(self._number, value)]
        return self._number(value)

    def _number(self, tensor: Any) -> int | None:
        if tensor is None:
            return None
        if not isinstance(tensor, torch.Tensor) or not traces.is_plain_fake(tensor):
            raise NotKept(f"a value of the trace that is a {type(tensor).__name__}")
        if id(tensor) not in self._tensors:
            self._tensors[id(tensor)] = len(self._kept)
            self._kept.append(
                KeptTensor(
                    self._storage(tensor),
                    tensor.storage_offset(),
                    tuple(tensor.shape),
                    tuple(tensor.stride()),
                    str(tensor.dtype).removeprefix("torch."),
                    tensor.requires_grad,
                    tensor.is_conj(),
                    tensor.is_neg(),
                )
            )
        return self._tensors[id(tensor)]

    def _storage(self, tensor: torch.Tensor) -> int:
        key = private.storage_key(tensor)
        if key not in self._storages:
            self._storages[key] = len(self._sizes)
            self._sizes.append((tensor.untyped_storage().nbytes(), str(tensor.device)))
        return self._storages[key]

    def _constant(self, node: fx.Node) -> KeptConstant:
        tensor = getattr(self._joint.module, str(node.target), None)
        if type(tensor) is not torch.Tensor or tensor.requires_grad or tensor.is_cuda:
            raise NotKept(f"{node.target}, which is no plain tensor")
        is_plain = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        if tensor.nbytes > _LARGEST_CONSTANT or not is_plain:
            raise NotKept(f"{node.target}, a tensor of {tensor.nbytes:,} bytes")
        dtype = str(tensor.dtype).removeprefix("torch.")
        return KeptConstant(str(node.target), dtype, tuple(tensor.shape), bytes_of(tensor))


def traced_again(kept: KeptGraph) -> JointGraph:
    """Return the traced step that a record describes.

    Raises `NotKept` if it names an object that does not exist.
    """
    root = nn.Module()
    for constant in kept.constants:
        root.register_buffer(constant.name, _constant_again(constant))
    graph, nodes = _graph_again(kept)
    module = traces.lazy_module(root, graph)
    modules, regions = (BySequence(*unpacked(each)) for each in (kept.modules, kept.regions))
    return JointGraph(
        module=module,
        placeholders=tuple(nodes[i] for i in kept.placeholders),
        sources=tuple(Source(*each) for each in unpacked(kept.sources)),
        write_backs=unpacked(kept.write_backs, nodes),
        raw_outputs=unpacked(kept.raw_outputs, nodes),
        metadata=wrappers.metadata_with(*unpacked(kept.metadata)),
        gradients=unpacked(kept.gradients, nodes),
        structure=Structure(*unpacked(kept.structure)),
        origins=Origins(modules, regions),
        decisions=Decisions(*unpacked(kept.decisions)),
        opaque=_NO_MODULES,
        detached=unpacked(kept.detached),
        checkpoints=Checkpoints[kept.checkpoints],
    )


def _graph_again(kept: KeptGraph) -> tuple[fx.Graph, list[fx.Node]]:
    graph = fx.Graph()
    tensors = _tensors_again(kept)
    nodes: list[fx.Node] = []
    for each in kept.nodes:
        args, kwargs = unpacked(each.args, nodes), unpacked(each.kwargs, nodes)
        target = each.target if isinstance(each.target, str) else unpacked(each.target)
        if each.op == "call_function" and target == "getitem":
            target = operator.getitem
        node = graph.create_node(each.op, target, args, kwargs, each.name)
        if node.name != each.name:
            raise NotKept(f"the name {each.name}, which another node has")
        node.meta.update({note: unpacked(value) for note, value in each.notes.items()})
        if each.op != "output":
            node.meta["val"] = _values_again(each.values, tensors)
        nodes.append(node)
    return graph, nodes


def _values_again(values: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if not isinstance(values, list):
        return None if values is None else tensors[values]
    kind, *numbers = values
    found = [None if number is None else tensors[number] for number in numbers]
    return tuple(found) if kind == -1 else found


def _tensors_again(kept: KeptGraph) -> list[torch.Tensor]:
    mode = private.FakeTensorMode(allow_non_fake_inputs=True)
    storages = [
        torch.empty(size, dtype=torch.uint8, device="meta").untyped_storage()
        for size, _ in kept.storages
    ]
    devices = [torch.device(device) for _, device in kept.storages]
    tensors = []
    for each in kept.tensors:
        flat = torch.empty(0, dtype=getattr(torch, each.dtype), device="meta")
        flat.set_(storages[each.storage], each.offset, each.shape, each.strides)
        flat = traces.conjugate_view(flat) if each.is_conjugated else flat
        flat = traces.negative_view(flat) if each.is_negated else flat
        flat.requires_grad_(each.requires_grad)
        tensors.append(traces.fake_in(mode, flat, devices[each.storage]))
    return tensors


def _constant_again(kept: KeptConstant) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(kept.content), dtype=torch.uint8) if kept.content else None
    dtype = getattr(torch, kept.dtype)
    if flat is None:
        return torch.empty(kept.shape, dtype=dtype)
    return flat.view(dtype).reshape(kept.shape)
