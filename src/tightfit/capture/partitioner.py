"""PyTorch's own choices for the same joint graph, as schedules: its partitioner, checkpoints.

Two ways: the min-cut partitioner of ``torch.compile`` (with ``activation_memory_budget``, a share
of the saved bytes, not a bound on the peak), and ``torch.utils.checkpoint`` around modules. A
schedule is an ordered list of computes. `tightfit.plan.assemble` makes a plan of it, like any
planner's: the same verifier and simulator judge it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from tightfit.capture.captured import Captured
from tightfit.errors import BadInput
from tightfit.graph.ir import OpId, ValueId
from tightfit.plan.assemble import keep_everything
from tightfit.plan.plan import Compute
from tightfit.torch_private import core as private


@dataclass(frozen=True)
class Schedule:
    """Computes in order, and the setting of PyTorch's that they come from."""

    setting: str
    computes: tuple[Compute, ...]


def min_cut_schedule(captured: Captured, share: float = 1.0) -> Schedule:
    """Return the choice of the min-cut partitioner.

    `share`: ``torch._functorch.config.activation_memory_budget``: between 0, keep the inputs only,
    and 1, the default. Returns the forward pass in the graph's order; the backward pass,
    recomputations among it, in the order in which the partitioner's backward module runs. Merging
    equal operators is off, so that it keeps the operators of the graph. Raises `BadInput` if it
    would compute an op again that may run once only, such as an update of a buffer.
    """
    module, forward_outputs = _joint_module(captured)
    forward, backward = private.min_cut_partition(module, forward_outputs, share)
    traced = captured.joint.module.graph
    number = {node.name: op for op, node in enumerate(captured.nodes) if node.graph is traced}
    ops = captured.graph.ops
    phases = captured.graph.segments
    computed = _Computes(captured)
    saved = [number[name] for name in _names(forward) if name in number]
    for op in range(len(ops)):
        if phases[ops[op].segment].phase == "forward" or op in saved:
            computed.add(op)
    for name in _names(backward):
        if name in number:
            computed.add(number[name])
    return Schedule(f"activation_memory_budget={share:g}", tuple(computed.done))


def _names(module: fx.GraphModule) -> list[str]:
    return [node.name for node in module.graph.nodes if node.op == "call_function"]


def _joint_module(captured: Captured) -> tuple[fx.GraphModule, int]:
    """Return a copy of the joint graph with its outputs in order, and how many are the forward's.

    The partitioner changes its input.
    """
    joint = captured.joint
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(joint.module.graph, copies)
    forward = [copies[node] for node, _ in joint.write_backs]
    forward += [copies[node] for node in joint.raw_outputs if isinstance(node, fx.Node)]
    output = graph.output((*forward, *(copies[node] for node, _ in joint.gradients)))
    output.meta["desc"] = [None] * len(output.all_input_nodes)
    phases = captured.graph.segments
    for node, copied in copies.items():
        copied.meta = dict(node.meta)
    for node in joint.placeholders:
        if node.meta.get("val") is None and not node.users:
            graph.erase_node(copies[node])  # a None among the inputs: the partitioner wants sizes
    for op, node in zip(captured.graph.ops, captured.nodes, strict=True):
        tag = f"is_{phases[op.segment].phase}"
        if node in copies:  # an extra op of some alternative is none of PyTorch's
            copies[node].meta.setdefault("partitioner_tag", tag)
    return fx.GraphModule(joint.module, graph), len(forward)


class _Computes:
    """A growing list of computes; each op's first computation differs from later ones."""

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self.first = {compute.op: compute for compute in keep_everything(captured.graph)}
        self.done: list[Compute] = []
        self._visited: set[OpId] = set()

    def add(self, op: OpId) -> None:
        """Compute an op once more; without readers it is left out."""
        if op in self._visited:
            self.done.append(self._again(op))
        elif op in self.first:
            self._visited.add(op)
            self.done.append(self.first[op])

    def _again(self, op_id: OpId) -> Compute:
        """The cheapest alternative with the same inputs as the default, not in place."""
        op = self.captured.graph.ops[op_id]
        default = op.alternatives[0]
        ways = [
            (variant.cost_s, number, index)
            for number, way in enumerate(op.alternatives)
            if way.use != "first"
            and way.exactness == "bitwise"
            and way.overwrites is None
            and set(way.reads) <= set(default.reads)
            for index, variant in enumerate(way.variants)
        ]
        if op.pinned is not None or not ways:
            reason = op.pinned or "it has no implementation that may run again"
            raise BadInput(
                f"PyTorch would compute op {op_id} ({op.target}) of {op.module or 'the model'} "
                f"again, which a plan may not: {reason}"
            )
        _, number, index = min(ways)
        return Compute(op_id, number, index)


def checkpoint_schedules(captured: Captured) -> Iterator[Schedule]:
    """Yield the schedules of ``torch.utils.checkpoint`` around modules, by depth of their names.

    At depth 2 each of ``layer1.0``, ``layer1.1``, ``fc``, ... is a block: forward ops whose module
    begins so. When the backward pass first needs a value made inside a block, the block's ops are
    computed again, up to the last op needed. They start from values that come from outside, which
    are kept. Values that no module made belong to no block.
    """
    names = [op.module.split(".") for op in captured.graph.ops if op.module]
    for depth in range(1, max((len(parts) for parts in names), default=0) + 1):
        blocks = [_block(op.module, depth) for op in captured.graph.ops]
        count = len({block for block in blocks if block})
        setting = f"{count} blocks, module names of depth {depth}"
        yield checkpoint_schedule(captured, blocks, setting)


def _block(module: str, depth: int) -> str:
    return ".".join(module.split(".")[:depth])


def checkpoint_schedule(captured: Captured, blocks: list[str], setting: str) -> Schedule:
    """Return the schedule of ``torch.utils.checkpoint`` around blocks.

    `blocks`: for each op the block it belongs to; "": none. Raises `BadInput` if an op would be
    computed again that may not be.
    """
    graph = captured.graph
    computed = _Computes(captured)
    forward = [
        op for op in computed.first if graph.segments[graph.ops[op].segment].phase == "forward"
    ]
    backward = [op for op in computed.first if op not in set(forward)]
    producer = {v: op for op in forward for v in graph.ops[op].alternatives[0].writes}
    inside = _needed_again(captured, blocks, producer, backward)
    for op in forward:
        computed.add(op)
    for op in backward:
        for again in inside.pop(blocks[op], ()):
            computed.add(again)
        computed.add(op)
    return Schedule(setting, tuple(computed.done))


def _needed_again(
    captured: Captured, blocks: list[str], producer: dict[ValueId, OpId], backward: list[OpId]
) -> dict[str, list[OpId]]:
    """For each block, its ops that its backward ops need, directly or through others in it."""
    ops = captured.graph.ops
    needed: dict[str, set[OpId]] = {}
    for op in backward:
        block = blocks[op]
        waiting = [op] if block else []
        found = needed.setdefault(block, set())
        while waiting:
            for value in ops[waiting.pop()].alternatives[0].reads:
                made = producer.get(value)
                if made is not None and blocks[made] == block and made not in found:
                    found.add(made)
                    waiting.append(made)
    return {block: sorted(found) for block, found in needed.items()}
