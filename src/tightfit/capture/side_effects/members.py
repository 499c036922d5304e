"""Parameters and buffers that a forward replaces, or whose data it does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tightfit.errors import CaptureError


class RepeatedMembers:
    """Puts back the parameters and buffers of modules registered under several names.

    The tracer swaps members name by name and puts back the member it found. For the second name of
    a module that is its own stand-in for the first.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        every = (top.named_modules(remove_duplicate=False) for top in modules.values())
        counts = Counter(module for named in every for _, module in named)
        self._modules = [module for module, count in counts.items() if count > 1]
        self._before: list[dict[str, Any]] = []

    def __enter__(self) -> RepeatedMembers:
        self._before = [{**m._parameters, **m._buffers} for m in self._modules]
        return self

    def __exit__(self, *_: Any) -> None:
        for module, before in zip(self._modules, self._before, strict=True):
            for members in (module._parameters, module._buffers):
                members.update({key: before[key] for key in members if key in before})


def _alike(a: Any, b: Any) -> bool:
    """Whether two are the same object, or tensors of the same shape, type and device."""
    if a is b:
        return True
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    return (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


def parameters_and_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a module, shared ones under each of their names."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return parameters | dict(module.named_buffers(remove_duplicate=False))


def members_of(module: nn.Module) -> dict[str, Any]:
    """Return the same, members that are None included."""
    return {
        f"{name}.{key}".lstrip("."): tensor
        for name, child in module.named_modules(remove_duplicate=False)
        for kept in (child._parameters, child._buffers)
        for key, tensor in kept.items()
    }


def write_replaced(module: nn.Module, before: Mapping[str, Any]) -> None:
    """Write the stand-ins of buffers into them, and put those back.

    `before`: its parameters and buffers before. Raises `CaptureError` if a parameter was replaced,
    or a buffer that is no tensor like it now, or has a history, which would be cut.
    """
    after = members_of(module)
    for key in [key for key in before if after.get(key) is not before[key]]:
        path, _, name = key.rpartition(".")
        owner = module.get_submodule(path)
        old, new = before[key], after.get(key)
        if name not in owner._buffers or not isinstance(new, torch.Tensor) or not _alike(old, new):
            raise CaptureError(
                f"an opaque module puts another tensor in the place of {key}, which only a buffer "
                f"of the same shape and type allows. Way out: write into it (self.{name}.copy_"
                "(...)). The model is unchanged"
            )
        owner._buffers[name] = old
        if new.requires_grad:
            raise CaptureError(
                f"an opaque module puts a tensor that requires a gradient in the place of its "
                f"buffer {name}: it runs as one op, which cuts the history of that. Way out: "
                f"detach it (self.{name} = ....detach()), or return it and pass it as an input"
            )
        with torch.no_grad():
            old.copy_(new)
