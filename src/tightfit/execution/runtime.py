"""Run a lowered plan behind autograd, as ordinary PyTorch training.

A step is a chain of autograd nodes, one for each group of gradients the plan hands over. The last
node made is the visible output. When backward reaches it, the backward generator starts, and each
node passes on the gradients that are finished by then. So they are accumulated, hooked and freed
while the rest of backward goes on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from tightfit.allocator import meter_for
from tightfit.allocator.refusals import budget_exceeded, is_refusal
from tightfit.allocator.resident import hold_alone
from tightfit.capture.captured import Captured
from tightfit.capture.normalise.gradients import added_up
from tightfit.execution import refused
from tightfit.execution.again import DifferentiatedCall, Repeatable
from tightfit.execution.chain import Chained, chained, goes_on_through
from tightfit.execution.changing import ChangingBuffers, LateReads, Unchanged
from tightfit.execution.lower import Program
from tightfit.execution.reached import Reached
from tightfit.execution.replanned import (
    grouped,
    has_other_strides,
    laid_out,
    refuse_others,
    tangent,
    unplanned,
)
from tightfit.execution.returned import (
    Returned,
    inputs_viewed,
    readers_of_outputs,
    refuse_inner_parts,
    viewed_outputs,
)
from tightfit.execution.run_state import RunState
from tightfit.execution.saved_reads import SavedReads
from tightfit.execution.stepping import refuse_other_backward
from tightfit.execution.sums import Sums, added_to, is_sum, outside_term_message, views_message
from tightfit.progress import announce
from tightfit.torch_private import core as private
from tightfit.torch_private import engine


class Runner:
    """Calls a program: placeholders in, outputs with gradients attached out.

    `changing`: buffers that code outside may change before the backward, which then reads copies;
    shared by runners of one captured step, or of this runner.
    """

    def __init__(
        self, captured: Captured, program: Program, changing: ChangingBuffers | None = None
    ) -> None:
        joint = captured.joint
        self.changing = changing or ChangingBuffers(joint.sources)
        self.captured = captured
        self.program = program
        self.joint = joint
        self.tangents = [(index, added_to(node)) for node, index in joint.tangents]
        self.device = joint.device
        self.returned = Returned(joint, chained)
        self.differentiable = frozenset(index for index, _ in self.tangents)
        self._readers = readers_of_outputs(joint)
        self._without: dict[frozenset[int], frozenset[int]] = {}
        self.saved_reads = SavedReads(joint)
        self.written = {position for _, position in joint.write_backs}
        self.stepped = tuple(position for _, position in joint.stepped)
        self.afterwards = " Parameters that were stepped by then stay so." if self.stepped else ""
        viewed = inputs_viewed(joint)  # after the chain, so that their gradients come before
        self.summed = {i for n, i in joint.gradients if is_sum(added_up(n)) or i in viewed}
        views = viewed_outputs(joint)
        self._mixed = {
            index
            for node, index in joint.tangents
            if index in views and any(map(is_sum, node.users))
        }

    def __call__(self, inputs: list[Any], run: Run) -> list[Any]:
        """Run the forward program on the placeholder tensors; return the flattened outputs."""
        detached = private.detached(inputs)
        for position in self.written:  # a buffer itself is, as it may take another shape
            if not inputs[position].requires_grad:
                detached[position] = inputs[position]
        for position in (*self.stepped, *self.returned.viewed_inputs):
            detached[position] = inputs[position]  # an optimizer or an output is to know it itself
        run.begin(self, detached, {i: inputs[i] for i in self.summed} if self.summed else {})
        outputs = self.returned(inputs, run)
        run.note_versions(inputs)
        if self._readers:
            refuse_inner_parts(outputs, self._readers)
        return outputs

    def without_gradient(self, missing: frozenset[int]) -> frozenset[int]:
        """Return the positions of placeholders that have no gradient where some outputs have none.

        Where others have a gradient, the missing gradients are zero.
        """
        if missing not in self._without:
            reached = self.joint.made_from_gradients(self.differentiable - missing)
            self._without[missing] = frozenset(
                position
                for node, position in (*self.joint.gradients, *self.joint.stepped)
                if node not in reached
            )
        return self._without[missing]

    def announce_sum(self, tell: Callable[[str], None], position: int) -> None:
        """Say it, once, if code outside the plan adds to a gradient that is a sum itself."""
        self.summed.discard(position)
        name = self.joint.sources[position].name
        tell(outside_term_message(name, self.captured.graph.name))

    def look_at_views(self, tell: Callable[[str], None], grad_outputs: Mapping[int, Any]) -> None:
        """Say it, once, if views of one another add to a gradient that is a sum in the plan."""
        if self._mixed and any(grad_outputs.get(index) is not None for index in self._mixed):
            self._mixed.clear()
            tell(views_message(self.captured.graph.name))


class Run(Chained):
    """One forward that awaits its backward.

    `on_start`, `on_finish`: called when backward begins and when its last gradient has been handed
    over. `repeatable`: runs the call again: for a backward that is to be differentiated, that has
    gradients of other outputs than planned for, or that comes after another (retain_graph). `tell`:
    tells the user of bits that may differ.
    """

    runner: Runner  # once the call has begun

    def __init__(
        self,
        on_start: Callable[[Run], None] = lambda run: None,
        on_finish: Callable[[Run], None] = lambda run: None,
        repeatable: Repeatable | None = None,
        tell: Callable[[str], None] = announce,
    ) -> None:
        self.inputs: list[Any] = []
        self.aliases: dict[int, Any] = {}
        self.saved: list[Any] | None = None
        self.freed_bytes: int | None = None  # of saved tensors, freed before the backward
        self.unchanged: Unchanged | None = None
        self.late_reads: LateReads | None = None
        self.generator: Any = None
        self.state = RunState.NEW
        self.on_start = on_start
        self.on_finish = on_finish
        self.reached = Reached()
        self.sums: Sums | None = None
        self._repeatable = repeatable
        self._tell = tell
        self._again: DifferentiatedCall | None = None
        self._node: weakref.ref[Any] | None = None

    def begin(self, runner: Runner, inputs: list[Any], summed: Mapping[int, torch.Tensor]) -> None:
        """Take the inputs of the forward program, and those whose gradients are sums."""
        self.runner = runner
        self.inputs = inputs
        self.sums = Sums(partial(runner.announce_sum, self._tell), runner.joint.gradients)
        for position, owner in summed.items():
            self.sums.watch(position, owner)

    def take_aliases(self) -> dict[int, Any]:
        """Return the outputs that are made again outside the program, and drop them."""
        aliases, self.aliases = self.aliases, {}
        return aliases

    def forward(self, node: Any) -> tuple[torch.Tensor, ...]:
        """Run the forward program; keep the saved tensors.

        `node`: the call's first node in autograd's graph.
        """
        self._node = weakref.ref(node)
        runner = self.runner
        inputs, self.inputs = self.inputs, []
        with private.without_autocast():
            raw, self.saved = runner.program.forward(inputs)
        self.state = RunState.AWAITS_BACKWARD
        returned = runner.returned
        if returned.outside:
            self.aliases = {i: raw[i] for i in returned.outside}
        return tuple([raw[i] for i in returned.plain])

    def note_versions(self, inputs: Sequence[Any]) -> None:
        """Note inputs that must not change until read, now that the call has changed its own."""
        runner = self.runner
        saved, kept = self.saved or [], runner.program.kept
        self.unchanged = Unchanged(saved, kept, runner.joint.sources, runner.changing)
        if reads := runner.program.late_reads:
            self.late_reads = LateReads(reads, inputs, runner.joint.sources)

    def start(self, gradients: Sequence[torch.Tensor | None], node: Any) -> None:
        """Begin the backward program with the gradients of the outputs, which came to a node."""
        runner = self.runner
        by_position = dict(zip(runner.returned.plain, gradients, strict=True))
        if runner.stepped:
            refuse_other_backward(runner, by_position, node, state=self.state)
        reads = partial(runner.saved_reads.read_by, by_position, node, runner.program.groups)
        if self.reached.has_freed(reads):
            raise refused.second_time(is_freed=False)
        if self._again is not None or (self._repeatable is not None and torch.is_grad_enabled()):
            self._start_again(by_position)
            return
        self._check_startable(with_copies=True)
        unplanned = self._note_gradients(by_position)
        if not (unplanned or runner.joint.other_strides):
            self._note_strides(by_position)
        if not self.reached.is_retained:
            self.reached.frees(reads, runner.saved_reads.may_follow if self._repeatable else None)
        if not unplanned:
            runner.look_at_views(self._tell, by_position)
        saved, self.saved = self.saved, None  # nothing frees them from now on
        if self.reached.needs_other_plan or saved is None:
            del saved
            self._check_startable()
            self._start_rerun(by_position, node)
            return
        self._drop_repeatable()
        if self.unchanged is not None:
            self.unchanged.read_copies()
            self.unchanged = None
        tangents = [tangent(by_position.pop(i, None), meta) for i, meta in runner.tangents]
        self.state = RunState.IN_BACKWARD
        self.on_start(self)
        assert self.sums is not None
        self.sums.start(node, runner.program.groups)
        begin_sum = (self.sums.begin,) if runner.program.sums else ()
        self.generator = runner.program.backward(saved, tangents, *begin_sum)
        self._end_with_backward()

    def _end_with_backward(self) -> None:
        """Have the running backward end where autograd asks for some of the gradients only."""
        if len(self.runner.program.groups) > 1:
            running = self.generator
            engine.after_this_backward(
                lambda: self._end(RunState.DONE) if self.generator is running else None
            )

    def _drop_repeatable(self) -> None:
        """Drop the means to run the call again, unless another backward may come."""
        if not self.reached.may_go_on:
            self._repeatable = None
        elif self._repeatable is not None:
            self._repeatable.retained()

    def _start_again(self, by_position: dict[int, torch.Tensor | None]) -> None:
        """Differentiate the call as plain PyTorch does: its gradients are to have a history."""
        runner = self.runner
        if self.state is not RunState.DIFFERENTIATED:
            if self._again is None:
                self._check_startable()
            if late := self._note_gradients(by_position):
                self._refuse(late)
            self.on_start(self)
        try:
            found = self._ran_again().gradients(by_position, runner.returned.canonical)
        except BaseException as error:
            self._fail(error, "A differentiated backward takes as much memory as in plain PyTorch.")
            raise
        if self.state is not RunState.DIFFERENTIATED:
            self._end(RunState.DIFFERENTIATED)
        groups = runner.program.groups or ((),)
        self.generator = ([found.pop(p, None) for p in positions] for positions in groups)

    @property
    def is_freed(self) -> bool:
        """Whether its saved tensors were freed before its backward."""
        return self.freed_bytes is not None

    def free_saved(self) -> int:
        """Free the saved tensors of a call that awaits its backward; return how many bytes.

        Its backward begins with its forward then, run once more.
        """
        if self.state is not RunState.AWAITS_BACKWARD or self.saved is None:
            return 0
        computed = self.saved[len(self.runner.program.kept) :]
        if not hold_alone(computed) or self._repeatable is None or not self._repeatable.may_free():
            return 0  # outputs that are held stay
        self._repeatable.freed()
        meter = meter_for(self.runner.device)
        before_bytes = meter.live_bytes()
        computed.clear()
        self.saved = self.unchanged = None
        self.freed_bytes = before_bytes - meter.live_bytes()
        return self.freed_bytes

    def _ran_again(self) -> DifferentiatedCall:
        """Return the call as it was run again under autograd; it is now, the first time."""
        if self._again is None:
            assert self._repeatable is not None and self._node is not None
            self.saved = self.unchanged = None
            before: list[DifferentiatedCall] = []

            def stand_in(given: Any, run: Run, output: int) -> Any:
                if given is not None and not goes_on_through(given.grad_fn, run):
                    return None
                call, other = run.output_run_again(output)
                before.extend([call] if call is not None and other is not None else [])
                return other

            repeatable = self._repeatable
            ran = repeatable.eager_forward(stand_in)
            self._again = DifferentiatedCall(
                self.runner.joint, ran, before, repeatable=repeatable, node=self._node
            )
            self._repeatable = None
        return self._again

    def output_run_again(self, place: int) -> tuple[DifferentiatedCall | None, torch.Tensor | None]:
        """Run the call again under autograd, as a later one does; return an output that it makes.

        `place`: which of the tensors that leave the chain of nodes.
        """
        if self._again is None:
            if self._repeatable is None or not self.state.may_begin_backward:
                return None, None
            self._check_startable()
        again, returned = self._ran_again(), self.runner.returned
        return again, again.output(returned.plain[place], returned.canonical)

    def output_once_more(self, place: int) -> torch.Tensor | None:
        """Run the call's forward once more; return an output, None if that cannot be.

        Parameters are as of `output_run_again`.
        """
        if self._repeatable is None or not self.state.may_begin_backward:
            return None
        return self._repeatable.outputs_once_more()[self.runner.returned.plain[place]]

    def promises_outputs(self) -> bool:
        """Whether it can make outputs again, and holds what that takes; or its backward was."""
        again = self._repeatable
        return not self.state.may_begin_backward or (again is not None and again.promises())

    def _check_startable(self, *, with_copies: bool = False) -> None:
        if not self.state.may_begin_backward:
            is_freed = self.reached.is_retained and self.state is RunState.DONE
            raise refused.second_time(is_freed=is_freed)
        if torch.is_grad_enabled() and self._repeatable is None:
            raise refused.differentiated()
        if self.unchanged is not None:
            self.unchanged.check(with_copies=with_copies)

    def _note_gradients(self, by_position: dict[int, torch.Tensor | None]) -> tuple[int, ...]:
        """Note which outputs have gradients; return outputs that were to have none, and have."""
        self.reached.begin(
            by_position,
            self.runner.differentiable,
            self.runner.joint.metadata.num_outputs,
            retained=engine.keeps_graph(),
        )
        return self.reached.unplanned

    def _note_strides(self, by_position: dict[int, torch.Tensor | None]) -> None:
        """Note gradients with other strides than were traced; plan again if the plan fixes them.

        Where the call cannot run again, they are copied, and a message says so.
        """
        runner, repeatable = self.runner, self._repeatable
        found = [(i, m) for i, m in runner.tangents if has_other_strides(by_position.get(i), m)]
        if not found:
            return
        is_fixed = runner.program.fixes_strides
        may_repeat = is_fixed and repeatable is not None and repeatable.may_free()
        self.reached.note_other_strides(needs_other_plan=may_repeat)
        if may_repeat or not is_fixed:
            return
        self._tell(
            f"the gradient of an output of {runner.captured.graph.name} has other strides than the "
            "output, and its plan takes the strides of the output: gradients are copied, and last "
            "bits may differ. Return the output as the loss reads it (contiguous, say)"
        )
        for i, meta in found:
            gradient = by_position[i]
            assert gradient is not None
            by_position[i] = laid_out(gradient, meta.shape, meta.stride())

    def _refuse(self, late: tuple[int, ...]) -> None:
        self.state = RunState.REFUSED
        self.on_start(self)
        raise unplanned(late[0])

    def _start_rerun(self, by_position: dict[int, torch.Tensor | None], node: Any) -> None:
        """Run the call again: its plan does not serve, or other outputs had gradients before."""
        runner, repeatable, reached = self.runner, self._repeatable, self.reached
        if repeatable is None:
            self._refuse(reached.unplanned)
            return
        if self.is_freed:
            self._tell(
                f"{runner.captured.graph.name}: there was no room for all that it has saved for "
                "its backward and for what came before that. The backward begins with its "
                "forward, run once more"
            )
        self.state = RunState.REPLANNED if reached.needs_other_plan else RunState.ONCE_MORE
        self.saved = self.unchanged = None
        self.on_start(self)
        groups = runner.program.groups
        grad_outputs = {i: g for i, g in by_position.items() if g is not None}
        by_position.clear()
        try:
            if reached.needs_other_plan:
                found = repeatable.replanned(grad_outputs)
                refuse_others(found, groups, reached.unplanned)
                self.generator = ([found.get(p) for p in group] for group in groups or ((),))
            else:
                assert self.sums is not None
                self.sums.start(node, groups)
                unread = runner.saved_reads.unread(frozenset(grad_outputs))
                coming = repeatable.once_more(grad_outputs, self.sums.begin, unread)
                self.generator = grouped(coming, groups)
        except BaseException as error:
            why = "The backward runs the forward of the call again."
            if reached.needs_other_plan:
                why = "The gradients of its outputs are other than planned for."
            self._fail(error, why)
            raise
        self._end_with_backward()

    def next_gradients(self, index: int) -> list[torch.Tensor | None]:
        """Return the next group of finished gradients; None as in eager, where nothing comes in."""
        if self._again is not None:
            return next(self.generator)
        groups = self.runner.program.groups
        try:
            if self.late_reads is not None and self.state is RunState.IN_BACKWARD:
                self.late_reads.check(index)
            with private.without_autocast():
                gradients = next(self.generator, [])
                if index + 1 >= len(groups):
                    next(self.generator, None)  # the optimizer may step until after the last
        except BaseException as error:
            why = "The backward was stopped before it took more than was planned for."
            self._fail(error, why + self.runner.afterwards)
            raise
        positions = groups[index] if groups else ()
        if self.reached.missing and self.state is not RunState.REPLANNED:
            nothing = self.runner.without_gradient(frozenset(self.reached.missing))
            for place, position in enumerate(positions):
                if position in nothing:
                    gradients[place] = None
        if self.sums is not None and self.state is not RunState.REPLANNED:
            self.sums.hand_over(positions, gradients)
        if index + 1 >= len(groups):
            self._end(RunState.DONE)
        return gradients

    def _fail(self, error: BaseException, why: str) -> None:
        """End a backward that raised; raise `BudgetExceeded` instead if a limit refused memory."""
        self._end(RunState.FAILED)
        if is_refusal(error):
            raise budget_exceeded(error, why) from error

    def _end(self, state: RunState) -> None:
        goes_on = self.reached.may_go_on and self._repeatable is not None
        self.state = RunState.RETAINED if state is RunState.DONE and goes_on else state
        if self.state is not RunState.RETAINED:
            self._repeatable = None
        if self.generator is not None:
            self.generator.close()
        self.generator = None
        self.unchanged = None
        if self.sums is not None:
            self.sums.end(goes_on=self.state is RunState.RETAINED)
        self.on_finish(self)

    @property
    def is_open(self) -> bool:
        return self.state.is_open
