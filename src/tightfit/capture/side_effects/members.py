"""Parameters and buffers that a forward replaces, or whose data it does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tightfit.capture.side_effects.attributes import Kept
from tightfit.errors import CaptureError
from tightfit.torch_private import core as private

__all__ = [
    "DataAssignments",
    "RepeatedMembers",
    "alike",
    "members_of",
    "replaced_buffers",
    "write_replaced",
]


class RepeatedMembers:
    """Puts back the parameters and buffers of modules registered under several names.

    The tracer swaps members name by name and puts back what it found, which for the second name
    of a module is what it had put there for the first. What the model's own code replaces stays.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        counts: dict[nn.Module, int] = {}
        for top in modules.values():
            for _, module in top.named_modules(remove_duplicate=False):
                counts[module] = counts.get(module, 0) + 1
        self._modules = [m for m, count in counts.items() if count > 1]
        self._before: list[dict[str, Any]] = []
        self._changed: set[tuple[int, str]] = set()

    def now(self) -> list[dict[str, Any]]:
        """Return the members as they are now."""
        return [{**m._parameters, **m._buffers} for m in self._modules]

    def note_changes(self, before: list[dict[str, Any]]) -> None:
        """Note what the model's own code has replaced since."""
        for index, (then, now) in enumerate(zip(before, self.now(), strict=True)):
            changed = {k for k in {*then, *now} if then.get(k) is not now.get(k)}
            self._changed |= {(index, key) for key in changed}

    def __enter__(self) -> RepeatedMembers:
        self._before = self.now()
        return self

    def __exit__(self, *_: Any) -> None:
        for index, (module, before) in enumerate(zip(self._modules, self._before, strict=True)):
            for members in (module._parameters, module._buffers):
                for key in [k for k in members if k in before]:
                    if (index, key) not in self._changed:
                        members[key] = before[key]


_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class DataAssignments(TorchFunctionMode):
    """Lets `tensor.data = value` write into the tensor."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func != _SET_DATA or not private.is_tracing() or not private.is_traced(args[0]):
            return func(*args, **(kwargs or {}))
        tensor, value = args
        if not alike(tensor, value):
            raise CaptureError(
                f"the forward pass gives a tensor of shape {list(tensor.shape)} other data, of "
                f"shape {list(value.shape)}. Way out: keep the shape and the dtype, or do it "
                "outside the fitted module"
            )
        if private.storage_key(value) != private.storage_key(tensor):
            with torch.no_grad():  # seen by autograd: nobody's backward may read it any more
                tensor.copy_(value)
        return None


def alike(a: Any, b: Any) -> bool:
    """Whether two are one, or tensors of the same shape, type and device."""
    if a is b:
        return True
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    return (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


def members_of(module: nn.Module) -> dict[str, Any]:
    """Return parameters and buffers by name, those of shared modules under each name."""
    return {
        f"{name}.{key}".lstrip("."): tensor
        for name, child in module.named_modules(remove_duplicate=False)
        for kept in (child._parameters, child._buffers)
        for key, tensor in kept.items()
    }


def replaced_buffers(module: nn.Module, before: Mapping[str, Any]) -> dict[Kept, torch.Tensor]:
    """Return what stands in the place of buffers, and put those back: it is a result of the step.

    Parameters
    ----------
    module : nn.Module
        Whose forward has run.
    before : mapping of str to tensor
        Its parameters and buffers before.

    Raises
    ------
    CaptureError
        If a parameter was replaced, or a buffer by something else than a tensor like it.
    """
    after = members_of(module)
    found: dict[Kept, torch.Tensor] = {}
    for key in [key for key in before if after.get(key) is not before[key]]:
        path, _, name = key.rpartition(".")
        owner = module.get_submodule(path)
        old, new = before[key], after.get(key)
        if name not in owner._buffers or not isinstance(new, torch.Tensor) or not alike(old, new):
            raise CaptureError(
                f"the forward pass puts another tensor in the place of {key}. A planned step "
                "replays operators, not Python, so this would silently stop happening. Way out: "
                f"write into it (self.{name}.copy_(...)). The model is unchanged",
                cause="state" if name in owner._buffers else "",  # may be set up the first time
            )
        found[path, "_buffers", name] = new
        owner._buffers[name] = old
    return found


def write_replaced(module: nn.Module, before: Mapping[str, Any]) -> None:
    """Write what stands in the place of buffers into them, and put those back: where one op runs.

    Parameters
    ----------
    module, before : nn.Module, mapping of str to tensor
        As in `replaced_buffers`.

    Raises
    ------
    CaptureError
        As there, and if what stands there has a history, which would be cut.
    """
    for (path, _, name), new in replaced_buffers(module, before).items():
        if new.requires_grad:
            raise CaptureError(
                f"an opaque module puts a tensor that requires a gradient in the place of its "
                f"buffer {name}: it runs as one op, which cuts the history of that. Way out: "
                f"detach it (self.{name} = ....detach()), or return it and pass it as an input"
            )
        with torch.no_grad():
            module.get_submodule(path)._buffers[name].copy_(new)  # type: ignore[union-attr]
