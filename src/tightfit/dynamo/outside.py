"""Code that ran outside of every plan: by module and reason, announced once, kept for the
report."""

from __future__ import annotations

import textwrap
import types
import weakref
from collections.abc import Callable, Mapping

import torch
from torch import nn

from tightfit.allocator.refusals import is_refusal
from tightfit.capture.origins import module_names
from tightfit.errors import BadInput
from tightfit.progress import announce
from tightfit.torch_private.saving import saving_hook
from tightfit.torch_private.tools import running_mode, running_transform

_LONGEST = 240
_BREAK = "the code where Dynamo ends a graph"
_MOST_BREAKS = 4  # that are named
_UNPLANNED = "parameters got gradients that no plan has made"


class Outside:
    """Notes frames left to Python.

    `left`: how often a frame or a graph was left to plain Python, so that calls have other graphs.
    """

    def __init__(self, name: str, modules: Mapping[str, nn.Module]) -> None:
        self._name = name
        self._modules = modules
        self._reasons: dict[str, str] = {}
        self._breaks: list[str] = []
        self.left = 0
        self._has_inner_frames = False
        self._says_compiled = True
        self._unplanned: list[str] = []  # modules whose parameters got a gradient of no plan
        self._is_planned: Callable[[torch.Tensor], bool] | None = None  # None: not checked

    def reasons(self) -> dict[str, str]:
        """Return why frames ran as plain Python, by their names."""
        for name in self._unplanned:
            place = f"module {name!r}" if name else "the outermost module"
            self._reasons.setdefault(place, _UNPLANNED)
        return dict(self._reasons)

    @property
    def has_outside_code(self) -> bool:
        """Whether something of calls ran as plain Python around graphs: there may be several."""
        return self._has_inner_frames or self.left > 0

    def entered_inner_frame(self) -> None:
        """Note that plain Python calls the forward of a module."""
        self._has_inner_frames = True

    def nothing_planned(self) -> BadInput:
        """Return an error: there is nothing to report but code that ran as plain Python."""
        text = "; ".join(f"{place}: {why}" for place, why in self.reasons().items())
        return BadInput(f"nothing is planned yet; ran outside of every plan: {text}")

    def watch(self, is_planned: Callable[[torch.Tensor], bool]) -> None:
        """Note which parameters get their first gradient although no plan has made it."""
        if self._is_planned is not None:
            if self._unplanned:
                self._say_unplanned()
            return
        self._is_planned = is_planned
        for name, module in module_names(self._modules).items():
            for parameter in nn.Module.parameters(module, recurse=False):
                if parameter.requires_grad and parameter.is_leaf:
                    _note_first_gradient(parameter, name, weakref.ref(self))

    def arrived(self, parameter: torch.Tensor, name: str) -> None:
        """Note that a parameter of a module has a gradient, if no plan has made it."""
        assert self._is_planned is not None
        if name not in self._unplanned and not self._is_planned(parameter):
            self._unplanned.append(name)

    def _say_unplanned(self) -> None:
        before = dict(self._reasons)
        text = [place for place in self.reasons() if place not in before]
        if text:
            announce(f"{self._name}: outside of every plan, {_UNPLANNED}: {', '.join(text)}")

    def skipped(
        self, code: types.CodeType, module: nn.Module | None, reason: str, error: Exception | None
    ) -> None:
        """Note a frame that Dynamo leaves alone, if it is the forward of a module.

        Raises `RuntimeError` if there was no room to look at it: it says nothing of the frame.
        """
        refusal = error
        while refusal is not None:
            if is_refusal(refusal):
                raise refusal
            refusal = refusal.__cause__ or refusal.__context__
        if module is None or "forward" not in code.co_name:  # or its rest behind a break
            return
        names = {each: name for name, each in module_names(self._modules).items()}
        name = names.get(module)
        if name is not None:
            self._leave(f"module {name!r}" if name else "the outermost forward", reason)

    def left_out(self, name: str, error: Exception) -> nn.Module | None:
        """Note that no plan holds a module, so that it runs as plain Python; return it."""
        module = module_names(self._modules).get(name)
        if module is not None:
            self._leave(f"module {name!r}", str(error))
        return module

    def runs_as_compiled(self, place: str) -> None:
        """Say, once, that code asks whether it is compiled, and where plain PyTorch looks at data.

        `place`: file and line.
        """
        if not self._says_compiled:
            return
        self._says_compiled = False
        announce(
            f"{self._name}: {place} asks whether it is compiled: plain PyTorch looks at data "
            "there, and this runs as compiled code does, for one graph. Last bits may differ"
        )

    def left_alone(self, error: Exception) -> None:
        """Note a graph that cannot be planned."""
        self._leave("a graph that cannot be planned", str(error))

    def broke(self, reason: str) -> None:
        """Note that a graph ends before the callable does."""
        if reason in self._breaks or len(self._breaks) == _MOST_BREAKS:
            return
        self._breaks.append(reason)
        number = f" ({len(self._breaks)})" * (len(self._breaks) > 1)
        self._note(f"{_BREAK}{number}", reason)

    def is_called_within(self) -> bool:
        """Whether a call of the whole is inside code that no plan can follow; that is noted."""
        around = _around_call()
        if around is not None:
            place, why = around
            self._note(f"a call within {place}", why)
        return around is not None

    def varies(self) -> None:
        """Note that numbers decide in every call which code a graph runs."""
        self._note(
            "a graph", "numbers change its operators in every call (tightfit.opaque: one op)"
        )

    def note_new_calls(self) -> None:
        """Note that calls run as plain PyTorch whose plans would hardly be used again."""
        self._note(
            "a call of new sizes or branches",
            "each of the last calls needed another plan, and plain PyTorch is expected to fit",
        )

    def _leave(self, place: str, reason: str) -> None:
        """Note a frame or a graph that is plain Python from now on."""
        self.left += place not in self._reasons
        self._note(place, reason)

    def _note(self, place: str, reason: str) -> None:
        first = textwrap.shorten(reason.strip().splitlines()[0], _LONGEST, placeholder=" ...")
        if place in self._reasons:
            return
        self._reasons[place] = first
        announce(f"{self._name}: {place} runs eagerly, outside of every plan: {first}")


def _note_first_gradient(parameter: torch.Tensor, name: str, outside: weakref.ref[Outside]) -> None:
    """Tell of the first gradient; the garbage collector does not see objects of such a hook."""

    def arrived(owner: torch.Tensor) -> None:
        handle.remove()
        found = outside()
        if found is not None:
            found.arrived(owner, name)

    handle = parameter.register_post_accumulate_grad_hook(arrived)


def _around_call() -> tuple[str, str] | None:
    """Return the transform, mode or hook around a call that no plan can follow, and why."""
    transform, mode, hook = running_transform(), running_mode(), saving_hook()
    if transform:
        return transform, "a plan has only the one backward"
    if mode:
        return f"the mode {mode}", "it may run other operators than those of a plan"
    if hook:
        return f"hooks of saved tensors ({hook})", "they decide which tensors are kept, not a plan"
    return None
