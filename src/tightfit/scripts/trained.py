"""The modules that a program trains, found by its calls and its optimizers, and their tensors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from tightfit.studies.bits import digest_of, is_zero


class TrainedModules:
    """The outermost modules that a program calls, and the optimizers that have stepped.

    Names are the same in every run of the program: the class of the outermost module, and the name
    inside it. A fitted module lives on where a plain one may not: a wrapper that a solver makes for
    each of its calls. What is left of such a module keeps its names.
    """

    def __init__(self) -> None:
        self._roots: list[tuple[str, weakref.ref[nn.Module]]] = []
        # They and the modules inside them when they were added, each before those inside it
        self._named: list[tuple[str, weakref.ref[nn.Module]]] = []
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._optimizers: list[tuple[str, weakref.ref[Any]]] = []
        self._stepped_in_backward: set[int] = set()
        self._roots_compared = 0

    def step_in_backward(self, optimizer: Any) -> None:
        """Leave out the gradients of an optimizer's parameters: one of the runs frees them."""
        groups = optimizer.param_groups
        self._stepped_in_backward |= {id(p) for group in groups for p in group["params"]}

    def add(self, module: nn.Module) -> None:
        """Add a module that is called by no other module, or fitted, unless its parent is known."""
        module = unwrapped(module)
        if module not in self._known:
            root = _unique_name(module, self._roots)
            self._roots.append((root, weakref.ref(module)))
            new = (
                (n, one) for n, one in module.named_modules(prefix=root) if one not in self._known
            )
            self._named += [(name, weakref.ref(one)) for name, one in new]
            self._known.update(module.modules())

    def modules(self) -> list[nn.Module]:
        roots = (reference() for _, reference in self._roots)
        return [module for module in roots if module is not None]

    def add_optimizer(self, optimizer: Any) -> str:
        """Add an optimizer that steps; return its name."""
        for name, reference in self._optimizers:
            if reference() is optimizer:
                return name
        name = _unique_name(optimizer, self._optimizers)
        self._optimizers.append((name, weakref.ref(optimizer)))
        return name

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return gradients, parameters and buffers by name; they are not copied."""
        parameters = dict(self._parameters())
        kept = (n for n, p in parameters.items() if id(p) not in self._stepped_in_backward)
        found = {f"gradient of {name}": parameters[name].grad for name in kept}
        found |= {f"parameter {name}": p.detach() for name, p in parameters.items()}
        found |= {f"buffer {name}": buffer for name, buffer in self._buffers()}
        return {name: t for name, t in found.items() if t is not None and t.numel()}

    def digests(self) -> dict[str, str]:
        """Return a hash of the bits of each of `tensors`."""
        if 0 < self._roots_compared < len(self._roots):
            gc.collect()
        self._roots_compared = len(self._roots)
        return {name: digest_of(tensor).hex() for name, tensor in self.tensors().items()}

    def has_gradient(self) -> bool:
        """Whether a gradient is other than zero."""
        gradients = (p.grad for _, p in self._parameters() if p.grad is not None)
        return not all(map(is_zero, gradients))

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter once: those of no module are named after their optimizer."""
        seen: set[int] = set()
        for root, module in self._living():
            for name, parameter in module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield f"{root}.{name}", parameter
        for name, reference in self._optimizers:
            optimizer = reference()
            groups = [] if optimizer is None else optimizer.param_groups
            for number, group in enumerate(groups):
                for index, parameter in enumerate(group["params"]):
                    if id(parameter) not in seen:
                        seen.add(id(parameter))
                        yield f"{index} of group {number} of {name}", parameter

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        seen: set[int] = set()
        for root, module in self._living():
            for name, buffer in module.named_buffers():
                if id(buffer) not in seen:
                    seen.add(id(buffer))
                    yield f"{root}.{name}", buffer

    def _living(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the outermost modules; where one is gone, the outermost ones inside it."""
        seen: set[nn.Module] = set()
        for name, reference in self._named:
            module = reference()
            if module is not None and module not in seen:
                seen.update(module.modules())
                yield name, module


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside `torch.compile`, `DistributedDataParallel` and `DataParallel`.

    On several devices `DataParallel` calls copies of its module, which no plan runs.
    """
    module = getattr(module, "_orig_mod", module)
    calls_it = isinstance(module, DistributedDataParallel) or (
        isinstance(module, DataParallel) and len(module.device_ids) <= 1
    )
    return module.module if calls_it else module


def _unique_name(thing: Any, known: list[tuple[str, Any]]) -> str:
    """Return the name of a class, with a number from its second object on."""
    name = type(thing).__name__
    count = sum(other.partition(" (")[0] == name for other, _ in known)
    return f"{name} ({count + 1})" if count else name
