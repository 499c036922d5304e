"""A case of what a call takes and hands back, trained plainly and through a door, step by step."""

from __future__ import annotations

import contextlib
import gc
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from support.contract.doors import Call, Door, plain
from support.contract.facts import (
    ANYTHING,
    Fact,
    bits,
    gradients,
    leaves,
    leaves_of_history,
    looked_at,
    same,
    state_of,
)
from support.contract.inputs import Inputs, data, given
from support.contract.verdicts import Outcome, Raised, Verdict, compared, worst

ONE = given(data)
STEPS = 3
MOST_CHANGED = 4
MOST_FAILED = 3


class Net(nn.Module):
    """Two layers, a parameter and a buffer, and a function of them and of the inputs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.p = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("h", torch.ones(8))
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def called(call: Call, module: nn.Module, *inputs: Any) -> Any:
    """Call it once with all inputs."""
    return call(*inputs)


def weighted(outputs: Any) -> torch.Tensor | None:
    """Return a loss that each element of each output changes, and each pair of outputs."""
    sums = []
    for index, (_, value) in enumerate(leaves(outputs, "")):
        if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()):
            drawn = torch.Generator().manual_seed(index)
            weight = torch.rand(value.shape, generator=drawn).to(value.device)
            term = value.real + value.imag if value.is_complex() else value
            sums.append((term * weight).sum().float())
    if not sums:
        return None
    total = torch.stack(sums).sum()
    for index, each in enumerate(sums):
        total = total + sum(each * other for other in sums[:index]) * 0.1
    return total


def of_first(outputs: Any) -> torch.Tensor:
    """Return a loss of the first output only."""
    return outputs[0].square().sum()


@dataclass(frozen=True, repr=False)
class OutputCase:
    """A module, its inputs, how it is called, and the loss of what comes back."""

    name: str
    model: Callable[[], nn.Module]
    inputs: Inputs = ONE
    use: Callable[..., Any] = called
    loss: Callable[[Any], torch.Tensor | None] = weighted
    budget: str = "1GiB"
    through: Callable[[Door, nn.Module, str], Call] = lambda door, module, budget: door(
        module, budget
    )
    """How the door is used; plain PyTorch calls the module."""
    change: Callable[[Any], Any] = lambda outputs: None
    """What the caller does with the outputs before the loss."""
    excuse: str = ""
    """What an announcement must name to excuse other values."""
    is_changed: bool = True
    """Whether the caller's own changes of outputs and inputs are tried as well."""

    def __repr__(self) -> str:
        return self.name


def judged(case: OutputCase, door: Door) -> Outcome:
    """Train a case plainly and through a door, then change each output in place; judge it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _judged(case, door)
    finally:
        torch._dynamo.reset()
        gc.collect()


def _judged(case: OutputCase, door: Door) -> Outcome:
    pair = _Pair(case, door)
    outcome = pair.train()
    outcomes = [outcome]
    if outcome.verdict is Verdict.WRONG or pair.reached == "call" or not case.is_changed:
        return outcome
    counts, failed = pair.counts, 0
    for way, change in CHANGES.items():
        for index in range(min(MOST_CHANGED, counts[way.split()[0]])):
            if outcome.verdict > Verdict.ALLOWED:
                pair = _Pair(case, door)
                failed += 1
            if failed > MOST_FAILED:
                return worst(outcomes)
            probe = Probe(way.split()[0], index, change)
            outcome = pair.probe(way.format(index), probe)
            outcomes.append(outcome)
            if outcome.verdict is Verdict.WRONG:
                return outcome
    return worst(outcomes)


def _multiply(tensor: torch.Tensor) -> None:
    tensor.logical_not_() if tensor.dtype == torch.bool else tensor.mul_(2)


def _add_silently(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.logical_not_() if tensor.dtype == torch.bool else tensor.add_(1)


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "output {} multiplied in place": _multiply,
    "output {} changed in place under no_grad": _add_silently,
    "output {} unsqueezed in place": lambda tensor: tensor.unsqueeze_(0),
    "input {} changed in place after the call": _add_silently,
}
"""What a caller does between the call and the backward."""


@dataclass(frozen=True)
class Probe:
    """One tensor that the caller changes in place after the call."""

    of: str
    """``"output"`` or ``"input"``."""
    index: int
    change: Callable[[torch.Tensor], Any]


class _Pair:
    """The same module twice: plain, and through a door."""

    def __init__(self, case: OutputCase, door: Door) -> None:
        self.case = case
        self.plain = _Life(case, plain)
        self.mine = _Life(case, door)
        self.reached = "backward"
        self.found: list[Fact | Raised] = []
        self.counts = {"output": 0, "input": 0}

    def train(self) -> Outcome:
        """Train the plain module, which no budget limits yet, then the other one."""
        expected = [self.plain.step(seed, None) for seed in range(STEPS)]
        self.counts = self.plain.counts
        for seed, facts in enumerate(expected):
            outcome = self._judged(f"step {seed}", facts, seed, None)
            if outcome.verdict is not Verdict.RIGHT:
                return outcome
        return Outcome(Verdict.RIGHT)

    def probe(self, where: str, probe: Probe) -> Outcome:
        """Take a step on both sides, after which the caller changes a tensor."""
        before = [t.detach().clone() for t in self.plain.state()]
        expected = self.plain.step(STEPS, probe)
        outcome = self._judged(where, expected, STEPS, probe)
        is_overwritten = isinstance(expected[-1], Raised) and expected[-1].stage == "backward"
        if outcome.verdict is not Verdict.WRONG or not (
            is_overwritten and self.reached == "optimizer"
        ):
            return outcome
        with torch.no_grad():
            for tensor, value in zip(self.plain.state(), before, strict=True):
                tensor.copy_(value)
        as_it_was = self.plain.step(STEPS, probe, saves_copies=True)
        if isinstance(as_it_was[-1], Raised):
            return outcome
        rest = compared(where, _gradients_of(as_it_was), _gradients_of(self.found))
        return Outcome(Verdict.ALLOWED, outcome.why) if rest.verdict is Verdict.RIGHT else outcome

    def _judged(
        self, where: str, expected: list[Fact | Raised], seed: int, probe: Probe | None
    ) -> Outcome:
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            found = self.found = self.mine.step(seed, probe)
        self.reached = self.mine.stage
        outcome = compared(where, expected, found, said.getvalue(), self.case.excuse)
        return outcome


def _gradients_of(facts: list[Fact | Raised]) -> list[Fact | Raised]:
    return [f for f in facts if not isinstance(f, Raised) and f[0].endswith(": gradient")]


def _copied_when_saved() -> contextlib.AbstractContextManager[Any]:
    """Let autograd save copies: what the caller overwrites afterwards changes no gradient."""
    return torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved)


class _Life:
    """One module in training."""

    def __init__(self, case: OutputCase, door: Door) -> None:
        self.case, self.door = case, door
        self.stage = "fit"
        self.counts = {"output": 0, "input": 0}
        torch.manual_seed(0)
        self.module = case.model()
        self.call: Call | None = None

    def state(self) -> list[torch.Tensor]:
        """Return the parameters and buffers as they are held now."""
        return [*self.module.parameters(), *self.module.buffers()]

    def step(
        self, seed: int, probe: Probe | None, *, saves_copies: bool = False
    ) -> list[Fact | Raised]:
        """Return what can be seen of a step; an error ends the list."""
        facts: list[Fact | Raised] = []
        torch.manual_seed(seed)
        saving = _copied_when_saved() if saves_copies else contextlib.nullcontext()
        try:
            self._step(facts, probe, saving)
        except Exception as error:
            error.__traceback__ = error.__cause__ = error.__context__ = None
            facts.append(Raised(self.stage, error))
        if probe is not None or isinstance(facts[-1], Raised):
            self.module.zero_grad()
        return facts

    def _step(
        self,
        facts: list[Fact | Raised],
        probe: Probe | None,
        saving: contextlib.AbstractContextManager[Any],
    ) -> None:
        case, module = self.case, self.module
        self.stage = "fit"
        if self.call is None:
            is_plain = self.door is plain
            self.call = module if is_plain else case.through(self.door, module, case.budget)
        inputs = case.inputs(module)
        given = list(leaves(inputs, "input"))
        tensors = [t for _, t in given if isinstance(t, torch.Tensor)]
        bases = {id(t._base): t._base for t in tensors if t._is_view()}
        given += [(f"base {i} of inputs", base) for i, base in enumerate(bases.values())]
        made_of = {id(leaf): leaf for t in tensors for leaf in leaves_of_history(t)}
        given += [(f"leaf {i} of inputs", leaf) for i, leaf in enumerate(made_of.values())]
        before = [(t._version, bits(t)) for t in tensors]
        self.stage = "call"
        with saving:
            outputs = case.use(self.call, module, *inputs)
        self.stage = "after the call"
        for index, (tensor, (version, content)) in enumerate(zip(tensors, before, strict=True)):
            # what is written must say so to autograd; what says so without need does no harm
            is_told = tensor._version != version and not same(content, bits(tensor))
            facts.append((f"input {index} is written", is_told or ANYTHING))
        returned = list(leaves(outputs, "output"))
        state = list(state_of(module))
        facts += looked_at(returned + given + state)
        found = [t for _, t in returned if isinstance(t, torch.Tensor)]
        self.counts = {"output": len(found), "input": len(tensors)}
        self.stage = "change"
        case.change(outputs)
        if probe is not None:
            probe.change((found if probe.of == "output" else tensors)[probe.index])
        seen = looked_at(returned + given + state)
        facts += [(f"after the change: {label}", value) for label, value in seen]
        self.stage = "loss"
        loss = case.loss(outputs)
        facts += looked_at([("loss", loss)])
        del outputs, returned, found
        if loss is not None and loss.requires_grad:
            self.stage = "backward"
            loss.backward()
        del loss
        self.stage = "after the backward"
        state = list(state_of(module))
        facts += gradients(given + state)
        after = looked_at(given + state)
        facts += [(f"after the backward: {label}", value) for label, value in after]
        facts += looked_at([("next random number", torch.rand(1))])
        del given, state, tensors, inputs
        self.stage = "optimizer"
        if probe is None:
            self._descend()

    def _descend(self) -> None:
        parameters = [p for p in self.module.parameters() if p.device.type != "meta"]
        if parameters:
            torch.optim.SGD(parameters, lr=0.01).step()
        self.module.zero_grad()
