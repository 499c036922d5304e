"""A change between two steps, made to a plain module and to one that came through a door."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from support.contract.doors import Door, plain
from support.contract.facts import Fact, gradients, leaves, looked_at, same, state_of
from support.contract.outputs import weighted
from support.contract.verdicts import Outcome, Raised, compared, worst

STEPS_EACH = 2


@dataclass
class Changing:
    """What a change may lay hands on; what it sets outside the module is set back at the end."""

    module: nn.Module
    call: Callable[..., Any]
    undo: ExitStack
    inputs: Callable[[], Any]
    """Makes the arguments of a call: a tuple, whose last item may be a dictionary of keywords."""
    around: list[Callable[[], AbstractContextManager[Any]]] = field(default_factory=list)
    """What is entered around the forward of each step."""
    handles: list[Any] = field(default_factory=list)
    """Handles of hooks."""
    runs: Callable[[Callable[..., Any], Any], Any] | None = None
    """What calls the module in the place of an ordinary call."""

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of something outside the module."""
        is_inherited = isinstance(owner, type) and name not in vars(owner)
        before = getattr(owner, name)
        setattr(owner, name, value)
        if is_inherited:
            self.undo.callback(delattr, owner, name)
        else:
            self.undo.callback(setattr, owner, name, before)

    def entry(self, owner: Any, key: Any, value: Any) -> None:
        """Set an entry of a container outside the module."""
        before = copy.copy(owner[key])
        owner[key] = value
        self.undo.callback(owner.__setitem__, key, before)

    def remove_hooks(self) -> None:
        """Remove the hooks whose handles are at hand."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()


Change = Callable[[Changing], Any]


def one_batch() -> tuple[torch.Tensor]:
    """Return the arguments of most calls."""
    return (torch.randn(4, 8),)


@dataclass(frozen=True, repr=False)
class ChangeCase:
    """A module, its inputs, and one change after the other, two steps after each."""

    name: str
    model: Callable[[], nn.Module]
    changes: tuple[Change, ...]
    inputs: Callable[[], Any] = one_batch
    is_seen: bool = True
    """Whether plain PyTorch trains otherwise once the first change is made."""

    def __repr__(self) -> str:
        return self.name


def judged_changes(case: ChangeCase, door: Door) -> Outcome:
    """Live a case plainly, then through a door; judge each step."""
    expected = _lived(case, plain)[0]
    found, said = _lived(case, door)
    outcomes = []
    for name, plain_facts in expected.items():
        if name not in found:
            break
        outcomes.append(compared(name, plain_facts, found[name], said))
    return worst(outcomes)


def has_effect(case: ChangeCase) -> bool:
    """Whether the first change makes a difference in plain PyTorch."""
    with_change = _lived(case, plain, 1)[0]
    without = _lived(case, plain, 1, is_changed=False)[0]
    for name, facts in with_change.items():
        others = without.get(name, [])
        if len(facts) != len(others):
            return True
        for one, other in zip(facts, others, strict=True):
            if isinstance(one, Raised) or isinstance(other, Raised):
                return True
            if one[0] != other[0] or not same(one[1], other[1]):
                return True
    return False


def _lived(
    case: ChangeCase, door: Door, most_changes: int = 9, *, is_changed: bool = True
) -> tuple[dict[str, list[Fact | Raised]], str]:
    """Return what was seen in each step, and what was announced."""
    found: dict[str, list[Fact | Raised]] = {}
    said = io.StringIO()
    numbers = torch.get_default_dtype(), torch.get_rng_state()
    try:
        with ExitStack() as undo, warnings.catch_warnings(), contextlib.redirect_stderr(said):
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            module = case.model()
            changing = Changing(module, door(module, "1GiB"), undo, case.inputs)
            seed = 0
            for number, change in enumerate((None, *case.changes[:most_changes])):
                if change is not None and is_changed:
                    torch.manual_seed(100 + number)
                    found[f"change {number}"] = _changed(change, changing)
                    if door is not plain and found[f"change {number}"]:
                        return found, said.getvalue()
                for each in range(STEPS_EACH):
                    name = f"change {number}, step {each}" if number else f"step {each}"
                    found[name] = _step(changing, seed)
                    seed += 1
                    if door is not plain and isinstance(found[name][-1], Raised):
                        return found, said.getvalue()
    finally:
        torch.set_default_dtype(numbers[0])
        torch.set_rng_state(numbers[1])
        torch._dynamo.reset()
        gc.collect()
    return found, said.getvalue()


def _changed(change: Change, changing: Changing) -> list[Fact | Raised]:
    try:
        change(changing)
    except Exception as error:
        error.__traceback__ = error.__cause__ = error.__context__ = None
        return [Raised("change", error)]
    return []


def _step(changing: Changing, seed: int) -> list[Fact | Raised]:
    facts: list[Fact | Raised] = []
    stages = ["inputs"]
    torch.manual_seed(seed)
    try:
        _trained(changing, facts, stages)
    except Exception as error:
        error.__traceback__ = error.__cause__ = error.__context__ = None
        facts.append(Raised(stages[-1], error))
    return facts


def _trained(changing: Changing, facts: list[Fact | Raised], stages: list[str]) -> None:
    module = changing.module
    given = changing.inputs()
    keywords = given[-1] if isinstance(given[-1], dict) else {}
    positional = given[:-1] if isinstance(given[-1], dict) else given
    stages.append("call")
    with ExitStack() as around:
        for enter in changing.around:
            around.enter_context(enter())
        if changing.runs is not None:
            outputs = changing.runs(changing.call, *positional)
        else:
            outputs = changing.call(*positional, **keywords)
    stages.append("after the call")
    facts += looked_at(list(leaves(outputs, "output")))
    loss = weighted(outputs)
    del outputs
    stages.append("backward")
    if loss is not None and loss.requires_grad:
        loss.backward()
    del loss
    stages.append("after the backward")
    named = [*leaves(given, "input"), *state_of(module)]
    facts += gradients(named)
    facts += [(label, value) for label, value in looked_at(named) if ": value" in label]
    facts += [(label, value) for label, value in named if not isinstance(value, torch.Tensor)]
    facts += looked_at([("next random number", torch.rand(1))])
    stages.append("optimizer")
    parameters = [*module.parameters()]
    if parameters:
        torch.optim.SGD(parameters, lr=0.01).step()
    module.zero_grad()
