"""A model that cannot be planned as a whole, planned block by block; the rest runs eagerly.

The outermost forward runs as plain Python, and so does that of every inner module that cannot be
captured. The modules inside them are captured and planned each by itself. In the first step every
block runs the plan with the least memory; what the step held then tells how much more they may
keep. Each block is checked, before it runs, against what is held at that moment.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import nn

from tightfit.api.block_bytes import BlockBytes
from tightfit.api.block_plans import (
    LEVELS,
    BlockPlan,
    Called,
    best_level,
    block_plan,
    plans_of_levels,
    predicted_peak,
)
from tightfit.api.candidates import may_be_planned
from tightfit.api.constants import gradient_bytes, new_gradient_bytes, resident_tensor_bytes
from tightfit.api.pipeline import capture_step
from tightfit.api.reporting import Report
from tightfit.capture.capture import placeholder_tensors
from tightfit.capture.joint import TracedCall
from tightfit.capture.lift import Captured
from tightfit.capture.signature import flatten, input_signature, module_signature
from tightfit.errors import (
    BadInput,
    CaptureError,
    InfeasibleBudget,
    OpaqueChanged,
)
from tightfit.execution.guard import Guard, StepPeaks, announce
from tightfit.execution.runtime import Run
from tightfit.graph.fingerprint import fingerprint
from tightfit.plan.plan import Gradients, Plan
from tightfit.units import format_bytes

if TYPE_CHECKING:
    from tightfit.api.session import Session

__all__ = ["Blocks"]


class _Planned:
    """One block on inputs of one kind: captured, with its plans."""

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self.plans: dict[Gradients, list[BlockPlan]] = {}


class Blocks:
    """Runs the forward of a session whose blocks are planned one by one.

    Parameters
    ----------
    session, reason : Session, CaptureError
        Whose function cannot be captured, and why; raised again if no block can be either.
    """

    def __init__(self, session: Session, reason: CaptureError) -> None:
        self.session = session
        self.reason = reason
        self.level = 0
        self.beside_bytes = 0
        self.calls: list[Called] = []
        self.glue: set[str] = set()
        self.candidates: set[str] = set()
        self.latest: dict[str, Called] = {}
        self.menus: dict[tuple[str, Gradients], list[Plan]] = {}
        self.known: dict[tuple[str, Any], list[_Planned]] = {}
        self.detached: dict[tuple[str, Any], frozenset[int]] = {}
        self.names = {
            module: name if len(session.modules) == 1 else f"{prefix}.{name}".rstrip(".")
            for prefix, top in session.modules.items()
            for name, module in top.named_modules()
        }
        self.bytes = BlockBytes(session, reason)
        self._replaced: list[tuple[nn.Module, Any]] = []
        self._backward_begun = False
        self._learned: StepPeaks | None = None
        gc.collect()  # what is freed during a step would look like room
        announce(f"{session.name} is planned block by block, not as a whole: {reason}")

    # -- running ------------------------------------------------------------------------------

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one forward, its blocks as planned."""
        leaves, _ = flatten(args, kwargs)
        self._watch(leaves)
        self.calls = []
        self._backward_begun = False
        with self._stand_ins():
            output = self.session.function(*args, **kwargs)
        if not self.known:
            raise self.reason
        self._guard.after_forward()
        return output

    @property
    def _guard(self) -> Guard:
        assert self.session.guard is not None
        return self.session.guard

    def _watch(self, leaves: list[Any]) -> None:
        """End the step before, learn from it, and begin to measure a new one."""
        session = self.session
        if session.guard is None:
            session.guard = Guard(
                self.bytes.budget, self.bytes.device, session.options.on_exceed, lambda: 0
            )
        guard = session.guard
        if guard.meter is None:
            raise self.reason
        guard.constants = lambda: self.bytes.constant(leaves)
        guard.before_forward()
        guard.budget_bytes = self.bytes.budget
        if session.options.optimizer is None and guard.growth_bytes > 0:
            new = guard.growth_bytes - gradient_bytes(session.modules, self.bytes.granularity)
            session.seen_state_bytes = max(session.seen_state_bytes or 0, new)
        if self.calls and guard.steps and guard.steps[-1] is not self._learned:
            self._learned = guard.steps[-1]
            grown = self.bytes.constant(leaves) - self._learned.constant_bytes
            self._learn(self._learned.peak_bytes, grown)

    def _learn(self, measured_bytes: int, grown_bytes: int) -> None:
        """Let blocks keep as much as the last step shows there is room for.

        Parameters
        ----------
        measured_bytes : int
            Its peak.
        grown_bytes : int
            What lasting memory (optimizer state, gradients) has come since it began.
        """
        budget = self.bytes.usable - grown_bytes
        ran = self.level
        level = best_level(self._worst_calls(), self._glue_gradient_bytes(), measured_bytes, budget)
        if level != self.level:
            announce(
                f"blocks of {self.session.name} run at {LEVELS[level]:.0%} between the least "
                "memory and keeping everything"
            )
        self.level = level
        self.beside_bytes = max(0, measured_bytes - self._predicted_bytes(ran))

    def _glue_gradient_bytes(self) -> int:
        """Return the new gradients of parameters outside the blocks."""
        inside = sum(call.gradient_bytes for call in self.calls)
        return max(0, new_gradient_bytes(self.session.modules, self.bytes.granularity) - inside)

    def _predicted_bytes(self, level: int) -> int:
        return predicted_peak(self.calls, level, self._glue_gradient_bytes())

    def _worst_calls(self) -> list[Called]:
        """Return the last step's calls, and one more for each module of a kind that was not run."""
        ran = {call.name for call in self.calls}
        kinds = {type(m): self.latest[name] for m, name in self.names.items() if name in ran}
        calls = list(self.calls)
        held_bytes = max(call.held_bytes + call.plan.saved_bytes for call in calls)
        for module, name in self.names.items():
            like = self.latest.get(name) or kinds.get(type(module))
            if name in self.candidates - self.glue - ran and like is not None:
                same = {"name": name, "level": calls[0].level, "held_bytes": held_bytes}
                calls.append(msgspec.structs.replace(like, **same))
                held_bytes += calls[-1].plan.saved_bytes
        return calls

    def report(self) -> Report:
        """Return what is planned for the blocks of the last step, and what it held.

        Raises
        ------
        BadInput
            If no step has run yet.
        """
        if not self.calls:
            raise BadInput(
                f"{self.session.name} is planned block by block while it first runs: call it once"
            )
        baseline_s = sum(call.plan.baseline_cost_s for call in self.calls)
        cost_s = sum(call.plan.cost_s for call in self.calls)
        steps = self._guard.steps
        return Report(
            budget_bytes=self.bytes.budget,
            constant_bytes=steps[-1].constant_bytes if steps else 0,
            planned_peak_bytes=self._predicted_bytes(self.level) + self.beside_bytes,
            overhead=cost_s / baseline_s - 1 if baseline_s else 0.0,
            bound=0.0,
            gap=cost_s / baseline_s - 1 if baseline_s else 0.0,
            status="feasible",
            cost_source=self.session.options.costs,
            measured=steps[-1] if steps else None,
            plan=None,
        )

    def _stand_in(
        self, name: str, module: nn.Module, function: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return what stands in for the forward of a block."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            planned = self._planned(name, module, function, args, kwargs)
            if planned is None:
                if name not in self.glue and torch.is_grad_enabled():
                    self.glue.add(name)
                    self._replace_children(module)
                return function(*args, **kwargs)
            return self._run(name, module, planned, flatten(args, kwargs)[0])

        return forward

    def _run(self, name: str, module: nn.Module, planned: _Planned, leaves: list[Any]) -> Any:
        joint = planned.captured.joint
        inputs = placeholder_tensors(joint, {"block": module}, leaves)
        owners = [inputs[position] for _, position in joint.gradients]
        parameters = [o for o in owners if o.is_leaf and isinstance(o, nn.Parameter)]
        missing = [p for p in parameters if p.grad is None]
        gradients: Gradients = "fresh" if missing or not parameters else "accumulated"
        if gradients not in planned.plans:
            with self._guard.paused():
                planned.plans[gradients] = self._plans(planned.captured, gradients)
        call = Called(
            name,
            planned.plans[gradients],
            self.level,
            self._guard.held_bytes(),
            resident_tensor_bytes(missing, self.bytes.granularity),
        )
        self._refuse_excess(call)
        self.calls.append(call)
        self.latest[name] = call
        run = Run(self._started(name, planned), self._finished)
        outputs = call.plan.runner(inputs, run)
        return joint.structure.filled(outputs)

    def _plans(self, captured: Captured, gradients: Gradients) -> list[BlockPlan]:
        """Return a plan for each level; blocks that are alike have the same ones."""
        kind = fingerprint(captured.graph), gradients
        if kind not in self.menus:
            self.menus[kind] = plans_of_levels(captured.graph, gradients, self.session.options)
        return [block_plan(captured, plan) for plan in self.menus[kind]]

    def _refuse_excess(self, call: Called) -> None:
        """Run a block with less memory where little is left; raise where none is enough.

        Room is left for the blocks that may follow, should they run with the least plans.
        """
        budget = self.bytes.usable
        following = self._following(call)
        while True:
            plan = call.plan
            needed = max(plan.forward_bytes, plan.saved_bytes + plan.backward_bytes)
            held = call.held_bytes + plan.saved_bytes
            fits = call.held_bytes + needed <= budget
            if fits and (call.level == 0 or predicted_peak(following, 0, 0) + held <= budget):
                return
            if call.level == 0:
                raise InfeasibleBudget(
                    f"block {call.name!r} needs {format_bytes(needed)} with its least plan, and "
                    f"{format_bytes(call.held_bytes)} are held when it starts: more than the "
                    f"budget of {format_bytes(self.bytes.budget)}. Raise the budget, or make "
                    f"{self.session.name} a model that can be planned as a whole: {self.reason}",
                    budget_bytes=self.bytes.budget,
                )
            call.level -= 1

    def _following(self, call: Called) -> list[Called]:
        """Return the blocks that have not run in this step, one after the other, least plans."""
        ran = {call.name, *(other.name for other in self.calls)}
        held_bytes, following = 0, list[Called]()
        for other in (other for name, other in self.latest.items() if name not in ran):
            following.append(msgspec.structs.replace(other, level=0, held_bytes=held_bytes))
            held_bytes += other.plans[0].saved_bytes
        return following

    def _started(self, name: str, planned: _Planned) -> Callable[[Run], None]:
        def started(run: Run) -> None:
            if run.state == "refused" or run.without_gradient:
                self._forget(name, planned, run)
            if not self._backward_begun:
                self._backward_begun = True
                self._guard.before_backward()

        return started

    def _forget(self, name: str, planned: _Planned, run: Run) -> None:
        """Capture a block again whose outputs receive other gradients than it was planned for."""
        for place, alike in self.known.items():
            if planned in alike:
                self.detached[place] = run.detached_after(self.detached.get(place, frozenset()))
                alike.remove(planned)

    def _finished(self, run: Run) -> None:
        if run.state == "failed":
            self._guard.abandon()
        else:
            self._guard.after_backward()

    # -- blocks -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _stand_ins(self) -> Iterator[None]:
        """Put stand-ins in place of the modules inside the outermost forward."""
        kept, self._replaced = self._replaced, []
        try:
            for top in self.session.modules.values():
                if self.session.root is not None or self.names[top] in self.glue:
                    self._replace_children(top)
                else:
                    self._replace(top)
            yield
        finally:
            for module, own in reversed(self._replaced):
                if own is None:
                    module.__dict__.pop("forward", None)
                else:
                    module.__dict__["forward"] = own
            self._replaced = kept

    def _replace_children(self, module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList | nn.ModuleDict) or self.names[child] in self.glue:
                self._replace_children(child)
            else:
                self._replace(child)

    def _replace(self, module: nn.Module) -> None:
        """Put a stand-in in place of a module that holds others; the smallest stay as they are."""
        if may_be_planned(module):
            self._replaced.append((module, module.__dict__.get("forward")))
            self.candidates.add(self.names[module])
            stand_in = self._stand_in(self.names[module], module, module.forward)
            module.__dict__["forward"] = stand_in

    def _planned(
        self, name: str, module: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> _Planned | None:
        """Return what was captured of a block for such a call; None if it cannot be captured."""
        if name in self.glue or not torch.is_grad_enabled():
            return None
        leaves, spec = flatten(args, kwargs)
        own = {"block": module}
        try:
            place = name, (input_signature(leaves, spec), module_signature(own, None))
            for planned in self.known.get(place, ()):
                joint = planned.captured.joint
                if joint.decisions.hold(leaves, {**own, **joint.outside}):
                    return planned
            call = TracedCall(function, own, args, kwargs, self.detached.get(place, frozenset()))
            with self._guard.paused():
                planned = _Planned(capture_step(call, self.session.options, name))
        except (BadInput, CaptureError, OpaqueChanged):
            return None
        self.known.setdefault(place, []).append(planned)
        return planned
