"""Kinds of calls of parts: captured once for all calls that are alike."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
import torch
from torch import nn

from tightfit.capture.captured import Captured, StepGuards, placeholder_tensors
from tightfit.capture.graph_calls import GraphCalls
from tightfit.capture.handed import GraphArguments, HandedGraph, HandedGraphs, takes_numbers
from tightfit.capture.input_uses import captured_by_uses
from tightfit.capture.stored import graph_key
from tightfit.capture.traced_call import TracedCall
from tightfit.execution.changing import ChangingBuffers
from tightfit.execution.lower import lower
from tightfit.execution.runtime import Run, Runner
from tightfit.graph.fingerprint import fingerprint
from tightfit.plan.assemble import everything_kept
from tightfit.plan.plan import Plan
from tightfit.plan.verify import verify
from tightfit.progress import announce
from tightfit.session.options import Options
from tightfit.session.outputs import OutputGradients
from tightfit.session.parts.kind_plans import KindPlans, least_plan
from tightfit.session.processes import agreed
from tightfit.session.step.holding import Holding, holding_of
from tightfit.session.step.repeated import RepeatedCalls

_MOST_KEPT = 64  # signatures of calls
_MOST_ALIKE = 1024  # parts of one signature, each for all that it has read so far


def class_of(module: nn.Module | None) -> Any:
    """Return what modules have in common that are expected to hold about as much: their class.

    That of a container says nothing without those of its modules.
    """
    if isinstance(module, nn.Sequential | nn.ModuleList):
        return type(module), *map(class_of, module.children())
    return type(module)


class Part:
    """Modules whose graphs are planned by themselves: most often a single module.

    `modules`: a single module by the name ``"part"``, which all such parts share, or those of the
    whole callable. `alike`: how many modules of the model are of its class. `is_gathered`: whether
    its parameters are there while it runs only: it cannot be run again.
    """

    def __init__(
        self,
        name: str,
        modules: Mapping[str, nn.Module],
        *,
        alike: int = 1,
        is_gathered: bool = False,
    ) -> None:
        self.name = name
        self.modules = modules
        self.alike = alike
        self.is_gathered = is_gathered
        self.function = HandedGraphs(modules)
        self._keys: dict[int, Any] = {}
        self._calls = GraphCalls(self.function)

    def given(self, graph: HandedGraph, inputs: Sequence[Any]) -> GraphArguments:
        return self.function.arguments(graph, inputs)

    def key(self, given: GraphArguments) -> Any:
        """Return a key that is equal for calls that run the same on members of the same names."""
        number = given.args[-1]
        if number not in self._keys:
            self._keys[number] = graph_key(self.function, number)
        return self._calls.signature(given), self._keys[number]

    def needs_gradient(self, given: GraphArguments) -> bool:
        """Whether a call with these inputs can need a gradient."""
        tensors = (x for x in given.inputs if isinstance(x, torch.Tensor))
        if not torch.is_grad_enabled():
            return False
        return any(x.requires_grad for x in tensors) or bool(self.function.leaves(given.args[-1]))

    def is_as_it_was(self, given: GraphArguments, key: Any) -> bool:
        """Whether a call with these inputs would now run the step of the call with a key."""
        return self.key(given) == key and self._calls.is_as_it_was(given, key[0])

    @functools.cached_property
    def member(self) -> tuple[int, ...]:
        """Tells its modules from those of other parts: several graphs may be of the same."""
        return (*map(id, self.modules.values()),)

    def is_of_class(self, other: Part) -> bool:
        """Whether both are modules of the same class."""
        own, others = self.modules.values(), other.modules.values()
        return [*map(class_of, own)] == [*map(class_of, others)]


@dataclass(frozen=True)
class PartCall:
    key: Any  # of calls that are alike
    kind: Kind  # the captured step of those, with its plans
    given: GraphArguments  # its inputs


class KnownCalls(RepeatedCalls):
    """The captured kinds of the parts of a model.

    `capture`: given a call and a name, returns the captured step of a part.
    """

    def __init__(self, capture: Callable[[TracedCall, str], Captured]) -> None:
        super().__init__()
        self._capture = capture
        self._known: dict[Any, list[tuple[Part, Kind]]] = {}
        self._detached: dict[Any, frozenset[int]] = {}
        self._output_gradients = OutputGradients()
        self._called: dict[Any, Part] = {}
        self._other_strides: set[Any] = set()  # graphs whose gradients come so

    def __len__(self) -> int:
        """Return how many kinds of calls are known."""
        return len(self._known)

    @property
    def vary(self) -> bool:
        """Whether any part was called with other inputs than before."""
        parts = [part for alike in self._known.values() for part, _ in alike]
        return len(set(parts)) < len(parts)

    def known(self, part: Part, given: GraphArguments) -> PartCall | None:
        """Return the kind of a call, if one like it was captured."""
        key = part.key(given)
        for owner, kind in self._known.get(key, ()):
            joint = kind.captured.joint
            if owner is not part and joint.opaque.calls:
                continue
            if kind.holds(given.leaves, part.modules):
                if owner is not part:
                    self._known[key].append((part, kind))
                return PartCall(key, kind, given)
        return None

    def capture(self, part: Part, given: GraphArguments, options: Options) -> PartCall:
        key = part.key(given)
        detached = self._detached.get(key, frozenset())
        traced = TracedCall(
            part.function,
            part.modules,
            given.args,
            given.kwargs,
            detached_outputs=detached,
            numbers=takes_numbers(part.function, given.args),
            other_strides=key[1] in self._other_strides,
        )
        captured, repeated = captured_by_uses(lambda call: self._capture(call, part.name), traced)
        graph = captured.graph
        limits = options.limits
        if options.ranks is None:
            limits = msgspec.structs.replace(limits, seconds=min(limits.seconds, _AT_ONCE_S))
        least = agreed(
            options.ranks,
            f"least {fingerprint(graph)}",
            Plan,
            lambda: least_plan(graph, part.alike, limits),
        )
        verify(least, graph)
        before = sum(owner is part for alike in self._known.values() for owner, _ in alike)
        name = f"{part.name} (another call, {before})" if before else part.name
        most = everything_kept(graph)
        holdings = holding_of(graph, least), holding_of(graph, most)
        plans = KindPlans(graph, name, *holdings, part.alike)
        leaves = [*given.leaves, *(given.leaves[place] for place in repeated)]
        guards = StepGuards(captured.joint, leaves, part.modules)
        kind = Kind(captured, plans, guards, repeated)
        alike = self._known.setdefault(key, [])
        alike.append((part, kind))
        del alike[:-_MOST_ALIKE]
        forget_oldest(self._known)
        return PartCall(key, kind, given)

    def learn_outputs(self, part: Part, key: Any, run: Run) -> None:
        """Note which outputs of a call have received no gradient, or did though planned without."""
        self.note_backward(key)
        if run.reached.in_other_strides:
            self._other_strides.add(key[1])
            self._known.pop(key, None)
        if run.reached.unplanned:
            self._detached[key] = self._detached.get(key, frozenset()) - run.reached.used
            self._known.pop(key, None)
        self._output_gradients.note(key, run.reached)
        self._called.setdefault(key, part)

    def settle_outputs(self) -> None:
        """Plan from now on without the gradients of outputs that received none in any call."""
        for key, part in self._called.items():
            unused = self._output_gradients.end_step(key)
            if unused:
                self._detached[key] = self._detached.get(key, frozenset()) | unused
                self._known.pop(key, None)
                announce(f"outputs {sorted(unused)} of part {part.name!r} receive no gradient")
        self._called.clear()


def forget_oldest(known: dict[Any, Any]) -> None:
    """Keep no more than some entries about calls, the latest."""
    while len(known) > _MOST_KEPT:
        del known[next(iter(known))]


_AT_ONCE_S = 1.0  # for the plan of the first steps: a step waits for it


@dataclass(eq=False)
class Kind:
    """Parts that are alike: one captured step, one plan."""

    captured: Captured  # the step of such a part, priced
    plans: KindPlans  # those found for it
    guards: StepGuards  # with the modules of the part that was captured
    # Flattened inputs that the captured step takes again, for each use; see `capture.uses`
    repeated: tuple[int, ...] = ()
    _runners: WeakKeyDictionary[Holding, Runner] = field(default_factory=WeakKeyDictionary)

    def __post_init__(self) -> None:
        self._changing = ChangingBuffers(self.captured.joint.sources)

    @property
    def name(self) -> str:
        """The first such part; no two kinds have the same."""
        return self.plans.name

    @property
    def least(self) -> Holding:
        """That of the plan that saves least of those found."""
        return self.plans.least

    @property
    def most(self) -> Holding:
        """That of the plan that keeps everything."""
        return self.plans.most

    @property
    def at_first(self) -> Holding:
        """That by which it runs in steps of which nothing is known.

        If the plan that saves least takes as much as plain PyTorch by itself, everything is kept
        where there is room: outputs that are computed again may be held twice.
        """
        return self.most if self.least.peak_bytes >= self.most.peak_bytes else self.least

    def inputs(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the flattened inputs of the captured step for those of a call."""
        return [*leaves, *(leaves[place] for place in self.repeated)]

    def holds(self, leaves: Sequence[Any], modules: Mapping[str, nn.Module]) -> bool:
        """Whether a call would read the same values, and its members share memory alike."""
        inputs = self.inputs(leaves)

        def tensors() -> list[Any]:
            return placeholder_tensors(self.captured.joint, modules, inputs)

        return self.guards.hold(inputs, modules, tensors)

    def runner(self, holding: Holding) -> Runner:
        """Return the runner of a plan; it is lowered the first time."""
        if holding not in self._runners:
            program = lower(self.captured, holding.plan)
            self._runners[holding] = Runner(self.captured, program, self._changing)
        return self._runners[holding]
