"""A model planned part by part: each part by itself, all within one budget.

What runs between the parts stays eager: it is measured in the first steps, in which every part
runs the plan that holds least. Then each kind of part (parts that are alike share their captured
step, their costs and their plan) has the plan that makes the whole step cheapest within the
budget.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tightfit.allocator import meter_for
from tightfit.api.budget import with_ranks
from tightfit.api.capturing import capture_around_data
from tightfit.api.constants import device_of_modules, lasting_bytes, library_bytes
from tightfit.api.ledger import Holding, Ledger, Recorder, holding_of
from tightfit.api.options import Options
from tightfit.api.ranks import Ranks, agreed
from tightfit.api.sharing import (
    Kind,
    Level,
    PartsReport,
    choose,
    least_plan,
    most_plan,
    refuse_options,
    report_of_parts,
)
from tightfit.capture.capture import placeholder_tensors
from tightfit.capture.joint import TracedCall
from tightfit.capture.signature import flatten, input_signature, module_signature
from tightfit.errors import BadInput, BudgetExceeded, InfeasibleBudget
from tightfit.execution.attach import attach_part, detach, original_forward
from tightfit.execution.guard import announce
from tightfit.execution.runtime import Run
from tightfit.graph.fingerprint import fingerprint
from tightfit.plan.plan import Plan
from tightfit.plan.verify import verify
from tightfit.units import format_bytes

__all__ = ["Part", "Parts"]

_ALIKE = 0.005  # of the budget: what two steps may differ by at their begin and still be alike
_MOST_LEVELS = 16
_MOST_KEPT = 64  # signatures of calls


class Parts:
    """Runs a model whose parts are planned.

    Parameters
    ----------
    root : nn.Module
        The model.
    parts : mapping of str to nn.Module
        By name, none inside another.
    options : Options
        The user's.
    group : ProcessGroup or None
        The processes that train the model together.
    late_bytes : int
        Of the budget, what plans leave unused for memory that other threads free in their own time.
    """

    def __init__(
        self,
        root: nn.Module,
        parts: Mapping[str, nn.Module],
        options: Options,
        *,
        group: Any = None,
        late_bytes: int = 0,
    ) -> None:
        refuse_options(options)
        self.root = weakref.ref(root)
        self.name = type(root).__name__
        self.options = with_ranks(options, Ranks(group)) if group is not None else options
        self.function = original_forward(root)
        self.late_bytes = late_bytes
        device = device_of_modules({"model": root})
        self.meter = meter_for(device)
        self.kinds: dict[Any, list[tuple[Part, Kind]]] = {}
        self.detached: dict[Any, frozenset[int]] = {}
        self.open: weakref.WeakSet[Run] = weakref.WeakSet()
        self.recorder: Recorder | None = None
        self._levels: dict[Any, list[Level]] = {}
        self._level: Level | None = None
        self._choices_made: Counter[Any] = Counter()
        self._last: PartsReport | None = None
        lasting = lasting_bytes(options.optimizer, {"model": root}, expected=False)
        lasting += library_bytes(device)
        self._base_bytes = lasting - self.meter.live_bytes()
        self.parts = [Part(module, self, name) for name, module in parts.items()]

    @property
    def limit_bytes(self) -> int:
        """What a step may hold."""
        assert self.options.budget_bytes is not None
        return self.options.budget_bytes - self.options.reserve_bytes

    @property
    def held_bytes(self) -> int:
        """What is held now, with all that was there when the model was fitted."""
        return self._base_bytes + self.meter.live_bytes()

    # -- as a session -------------------------------------------------------------------------

    def is_of(self, module: nn.Module) -> bool:
        """Whether this was made for the module (and not for one it was copied from)."""
        return self.root() is module

    def attach_parts(self) -> None:
        """Replace the forwards of the parts."""
        for part in self.parts:
            if part.module is not self.root():
                attach_part(part.module, part)

    def leave(self) -> None:
        """Give every part its own forward back."""
        for part in self.parts:
            if part.module is not self.root():
                detach(part.module)

    def join_replicas(self, wrapper: Any) -> None:
        """Refuse to run inside DistributedDataParallel."""
        if wrapper is not None:
            raise BadInput("a model with sharded parts is not wrapped in DistributedDataParallel")

    def prepare(self, leaves: list[Any], spec: Any, args: Any, kwargs: Any) -> PartsReport:
        """Refuse: parts are captured while the model runs."""
        raise BadInput(
            "parts are planned while the model takes its first step: train, then ask for "
            "tightfit.report(model)"
        )

    def report(self) -> PartsReport:
        """Return what the plans promise and what the last complete step held.

        Raises
        ------
        BadInput
            If no step has been taken yet.
        """
        self.close_step()
        if self._last is None:
            raise BadInput("nothing is known yet: take one step, forward and backward")
        return self._last

    # -- steps --------------------------------------------------------------------------------

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model; its parts run their plans."""
        if torch.is_grad_enabled() and not any(run.is_open for run in self.open):
            self._begin_step(input_signature(*flatten(args, kwargs)))
        own = next((part for part in self.parts if part.module is self.root()), None)
        return self.function(*args, **kwargs) if own is None else own(args, kwargs)

    def _begin_step(self, signature: Any) -> None:
        self.close_step()
        held = self.held_bytes
        self._level = level = self._level_of(signature, held)
        if level.ledger is not None:
            left = self.limit_bytes - held - self.late_bytes
            fits = not level.is_stale and level.ledger.peak_with(level.chosen) <= left
            if not fits:
                level.chosen = self._choose(signature, level.ledger, left)
            level.planned_bytes = held + level.ledger.peak_with(level.chosen)
        self.recorder = Recorder(self.meter)

    def _level_of(self, signature: Any, held_bytes: int) -> Level:
        """Return what is known of steps that begin with as much held as now.

        Gradients that are accumulated and the optimizer's state make steps differ that have the
        same inputs.
        """
        levels = self._levels.setdefault(signature, [])
        _forget_oldest(self._levels)
        alike_bytes = max(_ALIKE * self.limit_bytes, self.late_bytes)
        near = [x for x in levels if abs(x.held_bytes - held_bytes) <= alike_bytes]
        if near:
            return min(near, key=lambda level: abs(level.held_bytes - held_bytes))
        levels.append(Level(held_bytes))
        del levels[:-_MOST_LEVELS]
        return levels[-1]

    def close_step(self) -> None:
        """End the step under way: keep what was measured, compare it with the budget.

        Raises
        ------
        BudgetExceeded
            If it held more, and the user asked to raise.
        """
        recorder, self.recorder = self.recorder, None
        if recorder is None or not recorder.is_complete:
            return
        ledger = recorder.close()
        begin_bytes = self._base_bytes + recorder.first_bytes
        level = self._level
        assert level is not None
        planned = level.planned_bytes if level.planned_bytes else begin_bytes + ledger.peak_with({})
        level.ledger = ledger
        self._last = report_of_parts(ledger, begin_bytes, planned, self.limit_bytes)
        if self._last.measured_peak_bytes > self.limit_bytes:
            self._exceeded(self._last.measured_peak_bytes, ledger)

    def _exceeded(self, peak_bytes: int, ledger: Ledger[Kind]) -> None:
        mark = max(ledger.marks, key=lambda mark: mark.peak_bytes)
        where = (
            "between the planned parts (other modules, the loss, communication, the optimizer)"
            if mark.phase == "between"
            else f"in the {mark.phase} of part {ledger.calls[mark.call].name!r}"
        )
        message = (
            f"the last step of {self.name} held {format_bytes(peak_bytes)}, "
            f"{format_bytes(peak_bytes - self.limit_bytes)} more than the budget of "
            f"{format_bytes(self.limit_bytes)}; the peak was {where}. Raise the budget, or make "
            "what lies between the parts smaller"
        )
        if self.options.on_exceed == "raise":
            raise BudgetExceeded(message, budget_bytes=self.limit_bytes, measured_bytes=peak_bytes)
        warnings.warn(message, stacklevel=4)

    def _choose(self, signature: Any, ledger: Ledger[Kind], left_bytes: int) -> dict[Kind, Holding]:
        """Return the plans of a step's kinds of parts: those another rank chose, if they fit."""
        kinds = {kind.name: kind for kind in ledger.calls}
        number = self._choices_made[signature]
        self._choices_made[signature] += 1
        graphs = [fingerprint(kind.captured.graph) for kind in ledger.calls]

        def own() -> dict[str, Plan]:
            found = choose(ledger, left_bytes, self.options) or {}
            return {kind.name: holding.plan for kind, holding in found.items()}

        plans = agreed(self.options.ranks, f"parts {number} {graphs}", dict[str, Plan], own)
        if kinds and not plans:
            raise self._infeasible(ledger)
        chosen: dict[Kind, Holding] | None = {}
        for name, plan in plans.items():
            verify(plan, kinds[name].captured.graph)
            chosen[kinds[name]] = holding_of(kinds[name].captured.graph, plan)
        if ledger.peak_with(chosen) > left_bytes + self.late_bytes:
            chosen = choose(ledger, left_bytes, self.options)
        if chosen is None:
            raise self._infeasible(ledger)
        return chosen

    def _infeasible(self, ledger: Ledger[Kind]) -> InfeasibleBudget:
        least = ledger.peak_with({kind: kind.least for kind in ledger.calls})
        needed = least + self.held_bytes
        return InfeasibleBudget(
            f"no plans were found for the {len(ledger.calls)} parts of {self.name} within "
            f"{format_bytes(self.limit_bytes)}: {format_bytes(self.held_bytes)} are held between "
            f"steps, and with plans that save least a step holds {format_bytes(needed)}. Raise the "
            "budget to that, or make the batch smaller",
            budget_bytes=self.limit_bytes,
            minimum_bytes=needed,
        )

    def holding_for(self, kind: Kind) -> Holding:
        """Return by which plan a kind of part runs in the step under way."""
        assert self._level is not None
        return self._level.chosen.get(kind, kind.least)

    # -- parts --------------------------------------------------------------------------------

    def kind_for(
        self, part: Part, leaves: list[Any], spec: Any, args: Any, kwargs: Any
    ) -> tuple[Any, Kind]:
        """Return the key and kind of a call of a part; captured the first time."""
        key = (input_signature(leaves, spec), module_signature(part.modules, part.module))
        for owner, kind in self.kinds.get(key, ()):
            joint = kind.captured.joint
            if (owner is part or not joint.opaque.blocks) and joint.decisions.hold(
                leaves, part.modules
            ):
                return key, kind
        call = TracedCall(
            part.function,
            part.modules,
            args,
            kwargs,
            detached_outputs=self.detached.get(key, frozenset()),
        )
        assert self.recorder is not None
        with self.recorder.unwatched():
            captured, _ = capture_around_data(call, self.options, part.name)
            graph = captured.graph
            room_bytes = self.limit_bytes - self.held_bytes
            least = agreed(
                self.options.ranks,
                f"least {fingerprint(graph)}",
                Plan,
                lambda: least_plan(graph, room_bytes, self.options.limits),
            )
            verify(least, graph)
        before = sum(owner is part for alike in self.kinds.values() for owner, _ in alike)
        name = f"{part.name} (another call, {before})" if before else part.name
        kind = Kind(captured, name, holding_of(graph, least), holding_of(graph, most_plan(graph)))
        self.kinds.setdefault(key, []).append((part, kind))
        _forget_oldest(self.kinds)
        return key, kind


def _forget_oldest(known: dict[Any, Any]) -> None:
    while len(known) > _MOST_KEPT:
        del known[next(iter(known))]


class Part:
    """Runs one part of a model by its plan.

    Parameters
    ----------
    module : nn.Module
        The part.
    whole : Parts
        What it belongs to.
    name : str
        Its name in the model.
    """

    def __init__(self, module: nn.Module, whole: Parts, name: str) -> None:
        self._module = weakref.ref(module)
        self.whole = whole
        self.name = name
        self.function = original_forward(module)

    @property
    def module(self) -> nn.Module:
        """The part."""
        module = self._module()
        assert module is not None
        return module

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The part under a name that all parts share."""
        return {"part": self.module}

    def is_of(self, module: nn.Module) -> bool:
        """Whether this was made for the module (and not for one it was copied from)."""
        return self._module() is module

    def leave(self) -> None:
        """Refuse: parts leave with the whole model."""
        raise BadInput(f"{self.name!r} is part of a fitted model: tightfit.unfit the model")

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one planned forward of the part; its own forward if nothing needs a gradient."""
        whole = self.whole
        leaves, spec = flatten(args, kwargs)
        if whole.recorder is None or not self._needs_gradient(leaves):
            return self.function(*args, **kwargs)
        key, kind = whole.kind_for(self, leaves, spec, args, kwargs)
        holding = whole.holding_for(kind)
        recorder = whole.recorder
        call = recorder.forward_begins(kind, holding)

        def started(run: Run) -> None:
            recorder.backward_begins(call)
            self._learn_outputs(key, run)

        run = Run(started, lambda run: recorder.backward_ended())
        whole.open.add(run)
        inputs = placeholder_tensors(kind.captured.joint, self.modules, leaves)
        outputs = kind.runner(holding)(inputs, run)
        recorder.forward_ended(call)
        return kind.captured.joint.structure.filled(outputs)

    def _needs_gradient(self, leaves: list[Any]) -> bool:
        if not torch.is_grad_enabled():
            return False
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return any(t.requires_grad for t in (*tensors, *self.module.parameters()))

    def _learn_outputs(self, key: Any, run: Run) -> None:
        """Plan without the gradients of outputs that have received none, or with them again."""
        if run.state != "refused" and not run.unused:
            return
        before = self.whole.detached.get(key, frozenset())
        self.whole.detached[key] = run.detached_after(before)
        if run.state != "refused":
            announce(f"outputs {sorted(run.unused)} of part {self.name!r} receive no gradient")
        self.whole.kinds.pop(key, None)
