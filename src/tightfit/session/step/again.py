"""A planned call that can be run again in its backward, where its plan does not suffice."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence, Set
from itertools import chain
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn

from tightfit.capture.calls.structure import structure_of
from tightfit.capture.captured import Captured
from tightfit.capture.handed import GraphArguments
from tightfit.capture.side_effects.generators import GeneratorStates
from tightfit.capture.updates import decided_by_updates
from tightfit.errors import WITHOUT_A_PLAN, TightfitError
from tightfit.execution.again import EagerForward
from tightfit.execution.changing import versions_of
from tightfit.execution.replanned import Planned, gradients_at_once, gradients_in_turn, unplanned
from tightfit.execution.runtime import Run
from tightfit.progress import announce
from tightfit.session.step.autocast import AutocastState
from tightfit.session.step.held import HeldInputs, Others, StandIn
from tightfit.session.step.repeated import RepeatedCalls
from tightfit.torch_private import tools
from tightfit.torch_private.core import caches_parametrizations
from tightfit.torch_private.releases import DERIVATIVES
from tightfit.torch_private.saving import saving_hook

_T = TypeVar("_T")


class Step(Protocol):
    """The step that a call runs."""

    @property
    def captured(self) -> Captured: ...

    @property
    def key(self) -> Any: ...  # of calls that are alike


_Step = TypeVar("_Step", bound=Step)
_StepIn = TypeVar("_StepIn", bound=Step, contravariant=True)


class CallRepeater(Protocol[_StepIn]):
    """How calls are run again: of a callable that is one graph, or of parts of a callable."""

    @property
    def name(self) -> str:
        """The name of the callable."""

    @property
    def repeated(self) -> RepeatedCalls:
        """The calls that were run again, by the keys of their steps."""

    def function(self, step: _StepIn) -> Callable[..., Any]:
        """Return the program of a call where there is no plan."""

    def modules(self, step: _StepIn) -> Mapping[str, nn.Module]:
        """Return the modules whose buffers a call may write."""

    def inputs(self, step: _StepIn, given: GraphArguments) -> list[Any]:
        """Return the tensors of the placeholders of a call."""

    def serves(self, step: _StepIn, given: GraphArguments) -> bool:
        """Whether the captured step still serves a call, with modules and inputs of now."""

    def replanned(self, step: _StepIn, given: GraphArguments) -> Planned:
        """Plan a call for the outputs that are known to receive gradients now."""

    def planned_once_more(self, step: _StepIn, inputs: list[Any]) -> Planned:
        """Plan a call, on tensors, for a further backward, with memory held now."""

    def planned_forward(self, step: _StepIn, inputs: list[Any]) -> Planned:
        """Plan a call, on tensors, of which only the forward runs."""


class RepeatableCall(Generic[_Step]):
    """One planned call, run again if its backward is differentiated, or not the only one.

    It runs the call's callable on the call's inputs, as long as none of them has changed. The model
    is not kept alive: its buffers may hold this call.
    """

    def __init__(
        self, owner: weakref.ref[CallRepeater[_Step]], step: _Step, given: GraphArguments
    ) -> None:
        self._owner_reference = owner
        self._step = step
        self._given = HeldInputs(given)
        self._name = ""
        self._name = self._owner().name
        remembers = step.captured.draws and not _captures_cuda_graph()
        self._before = GeneratorStates() if remembers else None
        self._as_they_were: list[Any] = []
        self._autocast = AutocastState.now()
        self._is_freed = False  # whether its saved tensors were, before its first backward

    def _owner(self) -> CallRepeater[_Step]:
        found = self._owner_reference()
        if found is None:
            raise TightfitError(
                f"backward is to run a step of {self._name} again (create_graph=True, "
                "retain_graph=True, or an output that had no gradient before), and the model is "
                "gone. Way out: keep a reference to it until then"
            )
        return found

    def note_state(self, inputs: Sequence[Any]) -> None:
        """Note the state of the placeholders after the forward."""
        self._as_they_were = _state_of(inputs)

    def hold_only(self, kept: Set[int], written: Set[int]) -> None:
        """Hold only some of the inputs from now on; others exist while other code holds them.

        `kept`, `written`: the flattened inputs that the plan keeps, and that it writes.
        """
        repeated, key = self._owner().repeated, self._step.key
        others: Others = "in case" if repeated.may_repeat(key) else "none"
        others = "always" if repeated.is_repeated(key) else others
        self._given.hold_only(kept, written, others)

    def retained(self) -> None:
        """Hold the inputs that still exist: a further backward may come."""
        self._given.hold_all()

    def may_free(self) -> bool:
        """Whether the call can be run once more for its first backward, as far as is known now.

        Not where a mode is on that may be off by then; autocast is restored.
        """
        if self._decides_otherwise():
            return False
        try:
            given = self._given.now()
            written = {position for _, position in self._step.captured.joint.write_backs}
            with self._autocast.restored():
                return given is not None and self._obstacle(given, (), written) is None
        except (TightfitError, RuntimeError):  # the model is gone, or checking it needs memory
            return False

    def _decides_otherwise(self) -> bool:
        """Whether a further run of the forward would make something else, as things are now."""
        if self._why_not_once_more() or decided_by_updates(self._step.captured.joint):
            return True
        return saving_hook() or caches_parametrizations()

    def promises(self) -> bool:
        """Whether the call can be run once more later on; it holds what that takes, then."""
        return not self._decides_otherwise() and self._given.promise()

    def freed(self) -> None:
        """Hold the inputs: saved tensors were freed before the first backward."""
        self._is_freed = True
        self._given.hold_all()

    def eager_forward(self, stand_in: StandIn) -> EagerForward:
        """Run the forward again under autograd, on stand-ins for its inputs.

        It draws the same random numbers. Its writes go into copies: they were done before.
        """
        with self._autocast.restored():
            return self._eager_forward(stand_in)

    def _eager_forward(self, stand_in: StandIn) -> EagerForward:
        owner, step = self._owner(), self._step
        owner.repeated.note_repeated(step.key)
        made: set[int] = set()

        def noted(given: Any, run: Run, output: int) -> Any:
            other = stand_in(given, run, output)
            if other is not None:
                made.add(id(other))
            return other

        given = self._given.now(noted)
        written = {position for _, position in step.captured.joint.write_backs}
        reason = self._why_not_eagerly() or self._obstacle(given, made, written)
        if reason is not None or given is None:
            raise _unrepeatable(self._name, reason or "")
        with torch.enable_grad(), tools.WithoutDynamo():
            inputs = owner.inputs(step, given)
            copies = {id(inputs[p]): inputs[p].detach().clone() for p in written}
            run = _WithCopies(owner.function(step), owner.modules(step), copies)
            output = self._with_same_draws(lambda: run.run(given))
        tensors, _ = structure_of(output, self._name)
        assert len(tensors) == step.captured.joint.metadata.num_outputs
        return EagerForward(tensors, inputs, [None if id(x) in made else x for x in inputs])

    def _why_not_eagerly(self) -> str | None:
        """Return why the forward cannot be run twice with the same result and no further effect."""
        joint = self._step.captured.joint
        if reason := self._why_not_once_more():
            return reason
        if read := decided_by_updates(joint):
            return f"its forward writes {read[0]} and reads it, too"
        return "it returns numbers" if joint.structure.numbers else None

    def replanned(self, grad_outputs: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor | None]:
        """Run the call with a plan for the gradients of outputs that came.

        It draws the same random numbers. Its writes go into copies: they were done before. Returns
        the gradients of placeholders.
        """
        with self._autocast.restored(), torch.enable_grad():
            given = self._given_once_more()
            if isinstance(given, str):
                raise unplanned(max(grad_outputs), given)
            planned = self._owner().replanned(self._step, given)
            inputs = self._inputs_once_more(given)
        return self._with_same_draws(lambda: gradients_at_once(planned, inputs, grad_outputs))

    def once_more(
        self,
        grad_outputs: dict[int, torch.Tensor],
        begin_sum: Callable[[int, torch.Tensor], torch.Tensor],
        unread: Set[int],
    ) -> Iterator[dict[int, torch.Tensor | None]]:
        """Run the call with its plan for a further backward.

        It draws the same random numbers. Its writes go into copies: they were done before. Returns
        an iterator that runs the backward and yields the gradients of placeholders.

        `unread`: placeholders that may have changed since the call.
        """
        owner = self._owner()
        if not (self._is_freed or owner.repeated.is_repeated(self._step.key)):
            announce(
                f"{self._name}: several backwards go through one call: for each but the first its "
                "forward runs again. To spare that, sum the losses and call backward once"
            )
        planned, inputs = self._planned_once_more(owner.planned_once_more, unread)
        return self._with_same_draws(
            lambda: gradients_in_turn(planned, inputs, grad_outputs, begin_sum)
        )

    def outputs_once_more(self) -> list[Any]:
        """Run the forward once more, with the same random numbers; return its raw outputs."""
        planned, inputs = self._planned_once_more(self._owner().planned_forward)
        ready = [x.detach() if isinstance(x, torch.Tensor) else x for x in inputs]
        del inputs
        return self._with_same_draws(lambda: planned.program.forward(ready)[0])

    def _planned_once_more(
        self, plan: Callable[[_Step, list[Any]], Planned], unread: Set[int] = frozenset()
    ) -> tuple[Planned, list[Any]]:
        """Return a plan, and the placeholders to run it on.

        Raises `TightfitError` if the call cannot be run again.
        """
        if not self._is_freed:
            self._owner().repeated.note_repeated(self._step.key)
        with self._autocast.restored(), torch.enable_grad():
            given = self._given_once_more(unread)
            if isinstance(given, str):
                raise (_freed_and_gone if self._is_freed else _only_once)(self._name, given)
            inputs = self._inputs_once_more(given)
            return plan(self._step, inputs), inputs

    def _given_once_more(self, unread: Set[int] = frozenset()) -> GraphArguments | str:
        """Return inputs to run the planned forward on once more, or the reason why it cannot run.

        An input from another call that is gone, or was written into, is made again by that call.

        `unread`: placeholders that may have changed.
        """
        joint = self._step.captured.joint
        if reason := self._why_not_once_more():
            return reason
        read = decided_by_updates(joint)
        written = {p for _, p in joint.write_backs if joint.sources[p].name in read}
        made: dict[int, Any] = {}

        def made_again(given: Any, run: Run, output: int) -> Any:
            if given is not None and not written:
                return None
            other = run.output_once_more(output)
            if other is None:
                return None
            with torch.enable_grad():
                again = other.requires_grad_().view_as(other)  # with a history, as it had
            made[id(again)] = given
            return again

        given = self._given.now(made_again)
        exempt = {position for _, position in joint.write_backs} | unread
        reason = self._obstacle(given, made, exempt)
        if reason is not None or given is None:
            return reason or ""
        inputs = self._owner().inputs(self._step, given)
        late = [joint.sources[p].name for p in written if id(inputs[p]) not in made]
        return f"its forward writes {late[0]} and reads it, too" if late else given

    def _why_not_once_more(self) -> str | None:
        """Return why the planned forward cannot be run twice with the same result."""
        if self._before is None and self._step.captured.draws:
            return _DREW
        if self._step.captured.joint.opaque.changes_state:
            return "an opaque module writes its state"
        return None

    def _inputs_once_more(self, given: GraphArguments) -> list[Any]:
        """Return the placeholders; those that are written are copies: they were written before."""
        inputs = list(self._owner().inputs(self._step, given))
        for _, position in self._step.captured.joint.write_backs:
            inputs[position] = inputs[position].detach().clone()
        return inputs

    def _with_same_draws(self, run: Callable[[], _T]) -> _T:
        """Call a function with the random states that the call began with."""
        if self._before is None:
            return run()
        now = GeneratorStates()
        self._before.restore()
        try:
            return run()
        finally:
            now.restore()

    def _obstacle(
        self, given: GraphArguments | None, made: Container[int], exempt: Set[int] = frozenset()
    ) -> str | None:
        """Return the reason why the call cannot be run as it was.

        `given`: inputs to run it on; None: some are gone. `made`: identities of tensors made again.
        `exempt`: placeholders that may have changed.
        """
        owner, step = self._owner(), self._step
        if given is None:
            return "one of its inputs was freed; such inputs are held from the next call on"
        with torch.enable_grad():
            if not owner.serves(step, given):
                return "modules or modes were changed since the call"
            inputs = owner.inputs(step, given)
            states = zip(inputs, _state_of(inputs), self._as_they_were, strict=True)
            changed = (
                i
                for i, (x, now, before) in enumerate(states)
                if now != before and id(x) not in made
            )
            if not (exempt | step.captured.joint.unread).issuperset(changed):
                return (
                    "a parameter, buffer or input was changed since the call: change it after "
                    "backward"
                )
        return None


class _WithCopies(nn.Module):
    """Runs a callable with copies in place of the tensors that it writes.

    `copies`: by the identity of inputs, and of buffers and parameters of the modules.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        modules: Mapping[str, nn.Module],
        copies: Mapping[int, torch.Tensor],
    ) -> None:
        super().__init__()
        self.own = nn.ModuleList(modules.values())
        self._function = function
        self._copies = copies

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def run(self, given: GraphArguments) -> Any:
        args = tuple(self._copies.get(id(x), x) for x in given.args)
        every = {"remove_duplicate": False}  # statistics may be parameters that need no gradient
        members = chain(self.named_buffers(**every), self.named_parameters(**every))
        written = {name: self._copies[id(x)] for name, x in members if id(x) in self._copies}
        if not written:
            return self._function(*args, **given.kwargs)
        return torch.func.functional_call(self, written, args, dict(given.kwargs))


def _captures_cuda_graph() -> bool:
    """Whether a CUDA graph is captured: the state of generators cannot be read then."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _state_of(inputs: Sequence[Any]) -> list[Any]:
    """Return versions and addresses, which differ for a tensor that was changed since."""
    addresses = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in inputs]
    return list(zip(versions_of(inputs), addresses, strict=True))


def _only_once(name: str, reason: str) -> TightfitError:
    return TightfitError(
        f"backward runs through a step of {name} a further time: for that its "
        f"forward is run again, and here it cannot be, as {reason}. Call the model again, or sum "
        f"the losses and call backward once. {WITHOUT_A_PLAN}"
    )


def _freed_and_gone(name: str, reason: str) -> TightfitError:
    return TightfitError(
        f"the tensors that a step of {name} had saved for its backward were freed to keep to the "
        f"budget. For that its forward is to run once more, and here it cannot, as {reason}. Way "
        f"out: a larger budget. {WITHOUT_A_PLAN}"
    )


def _unrepeatable(name: str, reason: str) -> TightfitError:
    return TightfitError(
        f"the backward of {name} is to be differentiated itself (create_graph=True). For that "
        f"its forward is run again without a plan, and here it cannot be, as {reason}. Take the "
        f"derivative inside of the planned code (tightfit.step{_SINCE}), leave the part that needs "
        f"it out of the fitted module, or tightfit.unfit(model) first. {WITHOUT_A_PLAN}"
    )


_DREW = "its forward drew random numbers while a CUDA graph was captured"
_SINCE = "" if DERIVATIVES.is_available else f"; it needs PyTorch {DERIVATIVES.name} or later"
