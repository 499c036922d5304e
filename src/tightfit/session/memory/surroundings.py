"""The memory resident around a step now, as one frozen value: the key of a plan, and its task."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

import msgspec
import torch
from torch import fx

from tightfit.capture.captured import Captured
from tightfit.capture.nodes import storage_bytes
from tightfit.graph.ir import Graph, ValueId
from tightfit.plan.plan import Far, Gradients
from tightfit.planners.base import Task
from tightfit.session.step.gradient_lives import GradientLives
from tightfit.torch_private.core import storage_key
from tightfit.units import rounded_up

aten = torch.ops.aten

_TIMES_HELD = {aten._log_softmax.default: 1, aten.sigmoid.default: 2, aten.tanh.default: 2}
"""How often a loss outside a plan holds the output of one of these, with its gradient."""

_SLACK_BYTES = 4 << 10
_SLACK_SHARE = 100  # of a small loop's budget they may be no more
_KEPT_SHARE = 200  # of any budget: for what a loop may keep


@dataclass(frozen=True)
class Share:
    """The part of a budget for one of several calls."""

    peak_bytes: int  # may be held while it runs, other memory included
    others_bytes: int = 0  # others' limit between its forward and its backward
    # Left for later calls that keep it until after its backward
    reserved_bytes: int = 0
    part: float = 1.0  # its share of each further byte of the budget, at least


@dataclass(frozen=True)
class Surroundings:
    """The memory held in addition to a step, and the budget for all of it."""

    gradients: Gradients  # ``"fresh"`` or ``"accumulated"``
    # gradient_bytes, state_bytes: gradients that exist, with the buckets they go into; the
    # optimizer's state
    gradient_bytes: int
    state_bytes: int
    # Held by user code, or by another callable of the budget, between forward and backward
    outside_bytes: int
    others_bytes: int  # held the whole time, neither by the step nor by its model
    budget_bytes: int  # the part of the budget for the step, all of these included
    whole_bytes: int  # the budget
    # The step's share of each further byte of it
    part: float = field(default=1.0, compare=False)
    far: Far | None = None  # the far memory that its values may be moved to
    # Which inputs existed before the budget began: they take nothing of it
    earlier_inputs: tuple[int, ...] = ()
    # Gradients that wait for the step's own: see `step.gradient_lives`
    waiting_bytes: int = 0

    @property
    def held_bytes(self) -> int:
        """The bytes held the whole time in addition to the step's own constants."""
        return self.gradient_bytes + self.waiting_bytes + self.state_bytes + self.others_bytes

    @property
    def room_bytes(self) -> int:
        """The part of the budget that is left for the step."""
        return self.budget_bytes - self.held_bytes

    def with_share(self, share: Share) -> Surroundings:
        """Return the same for another part of the budget."""
        outside_bytes = max(self.outside_bytes, share.others_bytes)
        changed = share.peak_bytes, outside_bytes, share.part
        if changed == (self.budget_bytes, self.outside_bytes, self.part):
            return self
        return replace(
            self, budget_bytes=share.peak_bytes, outside_bytes=outside_bytes, part=share.part
        )

    def with_others(self, others_bytes: int) -> Surroundings:
        """Return the same with something else held by others."""
        return replace(self, others_bytes=others_bytes)

    def with_state(self, state_bytes: int) -> Surroundings:
        """Return the same with so much state of the optimizers, or with its own if that is more."""
        return replace(self, state_bytes=max(self.state_bytes, state_bytes))

    def with_lives(self, lives: GradientLives | None) -> Surroundings:
        """Return the same where gradients live so long; None: as they do in most loops."""
        if lives is None:
            return self
        waiting_bytes = lives.waiting_bytes
        if self.gradients == "fresh":  # those that last are counted from the begin on
            waiting_bytes = max(waiting_bytes, lives.lasting_bytes)
        return replace(self, gradients="accumulated", waiting_bytes=waiting_bytes)

    def with_outside(self, outside_bytes: int) -> Surroundings:
        """Return the same with something else held between forward and backward."""
        if outside_bytes == self.outside_bytes:
            return self
        return replace(self, outside_bytes=outside_bytes)

    def graph_of(self, captured: Captured) -> Graph:
        """Return a step's graph with the memory resident around it."""
        root_bytes = root_gradient_bytes(captured)
        graph = _without_inputs(captured, self.earlier_inputs).with_constants(
            gradients=self.gradient_bytes + self.waiting_bytes,
            optimizer_state=self.state_bytes,
            others=self.others_bytes,
            gradient_of_loss=root_bytes,
        )
        # user code makes the losses' own gradients: they are part of its measured bytes
        return graph.with_outside(max(0, self.outside_bytes - root_bytes))

    def task(self, captured: Captured) -> Task:
        return Task(
            graph=self.graph_of(captured),
            budget_bytes=self.budget_bytes,
            gradients=self.gradients,
            whole_bytes=self.whole_bytes if self.whole_bytes != self.budget_bytes else None,
            part=self.part,
            far=self.far,
        )


def _without_inputs(captured: Captured, inputs: Collection[int]) -> Graph:
    """Return a step's graph as if some of its inputs took no memory; `inputs`: their places."""
    graph, left_out = captured.graph, _input_values(captured, inputs)
    if not left_out:
        return graph
    sized = tuple(
        msgspec.structs.replace(v, size_bytes=0) if v.id in left_out else v for v in graph.values
    )
    left_bytes = input_bytes(captured, inputs)
    graph = graph.with_constants(inputs=graph.constants_bytes["inputs"] - left_bytes)
    return msgspec.structs.replace(graph, values=sized)


def input_bytes(captured: Captured, inputs: Collection[int]) -> int:
    """Return the bytes that a step's graph has for some of its inputs; `inputs`: their places."""
    values = captured.graph.values
    return sum(values[v].size_bytes for v in _input_values(captured, inputs))


def _input_values(captured: Captured, inputs: Collection[int]) -> set[ValueId]:
    nodes = (captured.joint.placeholders[place] for place in inputs)
    values = {captured.value_of[node] for node in nodes if node in captured.value_of}
    return {v for v in values if captured.graph.values[v].role == "input"}


def assumed_outside_bytes(captured: Captured) -> int:
    """Assume the bytes of a loss outside the plan until measured: three times the outputs.

    `cross_entropy` holds so much. Logarithms of probabilities go into `nll_loss`, which holds their
    gradient only, and outputs of a sigmoid or tanh are compared element by element.
    """
    return sum(times * size for times, size in held_by_losses(captured))


def expected_outside_bytes(captured: Captured) -> int:
    """Return the bytes that a loss outside the plan will probably hold, until it is measured.

    The gradient of each output, and further memory of a loss for one output at a time. The mean of
    squares holds an output four times, once more than is assumed of any loss. Where a number is
    among several outputs, that is taken to be the loss.
    """
    held = held_by_losses(captured)
    granularity = captured.graph.device.granularity_bytes
    numbers = [(times, size) for times, size in held if size <= granularity]
    held = numbers or held
    return sum(size for _, size in held) + max((times * size for times, size in held), default=0)


def held_by_losses(captured: Captured) -> list[tuple[int, int]]:
    """Return how often a loss holds each output that has a gradient, and the bytes of that."""
    tangents = (s for s in captured.joint.sources if s.kind == "tangent")
    made = {s.name: captured.joint.raw_outputs[s.index] for s in tangents}
    values = [value for value in captured.graph.values if value.role == "tangent"]
    targets = [getattr(made[value.name], "target", None) for value in values]
    times = [_TIMES_HELD.get(target, 3) for target in targets]
    return [(n, value.size_bytes) for n, value in zip(times, values, strict=True)]


def forward_output_bytes(captured: Captured) -> int:
    """Return the bytes of outputs of a forward: a loop may hold them until the next."""
    granularity = captured.graph.device.granularity_bytes
    made = {
        storage_key(node.meta["val"]): rounded_up(storage_bytes(node.meta["val"]), granularity)
        for node in captured.joint.raw_outputs
        if isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)
    }
    given = {
        storage_key(node.meta["val"])
        for node in captured.joint.placeholders
        if isinstance(node.meta.get("val"), torch.Tensor)
    }
    return sum(size for key, size in made.items() if key not in given)


def kept_by_loss_bytes(captured: Captured) -> int:
    """Return bytes that the result of a loss outside the plan may keep until the next.

    The numbers that `mse_loss` and `binary_cross_entropy` return keep as many bytes as were
    compared. They compare tensors of one shape, such as images and their reconstructions.
    """
    pairs = zip(captured.joint.sources, captured.joint.placeholders, strict=True)
    held = [(source.kind, node.meta.get("val")) for source, node in pairs]
    tensors = [(kind, x) for kind, x in held if isinstance(x, torch.Tensor)]
    given = {x.shape for kind, x in tensors if kind == "input"}
    return sum(x.nbytes for kind, x in tensors if kind == "tangent" and x.shape in given)


def with_slack(needed_bytes: int) -> int:
    """Return a budget with room for losses, counts and small outputs that a loop keeps."""
    return max(estimate_with_slack(needed_bytes), needed_bytes + needed_bytes // _KEPT_SHARE)


def estimate_with_slack(needed_bytes: int) -> int:
    """Return an estimated budget with less of that room: estimates have some already."""
    return needed_bytes + min(_SLACK_BYTES, needed_bytes // _SLACK_SHARE)


def root_gradient_bytes(captured: Captured) -> int:
    """Return the bytes of the losses' own gradients: `backward` holds them until it returns.

    Of a loss that is made outside the plan the number itself is held.
    """
    granularity = captured.graph.device.granularity_bytes
    tangents = (v for v in captured.graph.values if v.role == "tangent")
    own = sum(v.size_bytes for v in tangents if v.size_bytes <= granularity)
    return own or granularity
