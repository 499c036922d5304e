"""Finding the parts of a model while it runs: stand-ins for the forwards of its inner modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from tightfit.capture.around_data import may_be_planned
from tightfit.capture.calls.structure import Arguments
from tightfit.capture.origins import module_names
from tightfit.capture.side_effects.forwards import SwappedForwards
from tightfit.errors import BadInput, CaptureError, OpaqueChanged, without_frames
from tightfit.session.parts.kinds import Kind, Part
from tightfit.session.parts.steps import PartSteps

__all__ = ["StandIns"]


class StandIns:
    """A context in which the inner modules of a model run by their plans where they can.

    A module that cannot be captured runs as plain Python; what stands in then are its children.

    Parameters
    ----------
    modules : mapping of str to nn.Module
        The model's.
    steps : PartSteps
        Runs the parts.
    outermost : bool
        Whether the modules themselves may be parts; otherwise only what they hold.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], steps: PartSteps, *, outermost: bool
    ) -> None:
        self.modules = modules
        self.steps = steps
        self.outermost = outermost
        self.names = {module: name for name, module in module_names(modules).items()}
        self._numbers = {module: number for number, module in enumerate(self.names)}
        self._classes = Counter(map(type, self.names))
        self.glue: set[nn.Module] = set()
        self.failed: tuple[str, Exception] | None = None
        self.parts: dict[nn.Module, Part] = {}
        self._replaced = SwappedForwards()
        self._watched: dict[nn.Module, SwappedForwards] = {}

    def __enter__(self) -> None:
        for top in self.modules.values():
            if not self.outermost or top in self.glue:
                self._replace_children(top)
            else:
                self._replace(top)

    def __exit__(self, *details: object) -> None:
        for module in list(self._watched):
            self._unwatch(module)
        self._replaced.put_back()

    def absent(self) -> dict[Part, Kind]:
        """Return the parts that have not run yet, where others of their class have."""
        latest = self.steps.plans.latest
        like = {type(m): latest[part] for m, part in self.parts.items() if part in latest}
        return {
            part: like[type(module)]
            for module, part in self.parts.items()
            if module not in self.glue and part not in latest and type(module) in like
        }

    def _replace_children(self, module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList | nn.ModuleDict) or child in self.glue:
                self._replace_children(child)
            else:
                self._replace(child)

    def _replace(self, module: nn.Module) -> None:
        """Put a stand-in in place of a module that holds others; the smallest stay as they are."""
        if may_be_planned(module):
            if module not in self.parts:
                name, alike = self.names[module], self._classes[type(module)]
                number = self._numbers[module]
                self.parts[module] = Part(
                    name, {"part": module}, module.forward, alike=alike, number=number
                )
            self._replaced.swap(module, self._stand_in(module, self.parts[module]))
            self._watch(module)

    def _watch(self, module: nn.Module) -> None:
        """Notice what is called inside a module without a call of its own forward."""
        taken = self._replaced.modules.union(*(w.modules for w in self._watched.values()))
        self._watched[module] = SwappedForwards()
        for inner in module.modules():
            if inner not in taken and may_be_planned(inner):
                self._watched[module].swap(inner, self._bypass(module, inner))

    def _unwatch(self, module: nn.Module) -> None:
        if module in self._watched:
            self._watched.pop(module).put_back()

    def _bypass(self, module: nn.Module, inner: nn.Module) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            self._unwatch(module)
            self.glue.add(module)
            self._replace_children(module)
            return inner.forward(*args, **kwargs)

        return forward

    def _stand_in(self, module: nn.Module, part: Part) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            self._unwatch(module)
            if module in self.glue or not torch.is_grad_enabled():
                return part.function(*args, **kwargs)
            given = Arguments.of(args, kwargs)
            try:
                call = self.steps.kind_of(part, given)
            except (BadInput, CaptureError, OpaqueChanged) as error:
                if self.failed is None and getattr(error, "cause", "") not in ("data", "random"):
                    self.failed = part.name, error
                without_frames(error)
                self.glue.add(module)
                self._replace_children(module)
                return part.function(*args, **kwargs)
            return self.steps.run(part, call, given)

        return forward
