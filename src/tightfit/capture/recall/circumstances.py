"""All that a trace rests on and that is known before it is made, as text."""

from __future__ import annotations

import functools
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from tightfit.capture.calls.modules import HOOKS, SeenModules
from tightfit.capture.calls.signature import call_signature, flatten
from tightfit.capture.origins import module_names
from tightfit.capture.recall.naming import Naming, NotNamed
from tightfit.capture.trace.strides import TrueStrides
from tightfit.capture.traced_call import TracedCall
from tightfit.torch_private import core as private
from tightfit.torch_private import traces
from tightfit.torch_private.saving import saving_hook
from tightfit.torch_private.settings import settings_of_kernels, within_modes
from tightfit.version import __version__

__all__ = ["circumstances"]

_PACKAGES = ("site-packages", "dist-packages")


def circumstances(call: TracedCall, strides: TrueStrides | None) -> str:
    """Return what a call, its modules, PyTorch and this installation are like.

    Two calls in the same circumstances are traced alike if the code that runs and what that reads
    are the same, too.

    Raises
    ------
    NotNamed
        If anything has no name that would mean the same in another process.
    """
    _refuse_what_sees_operators()
    naming = Naming(call.modules)
    leaves, spec = flatten(call.args, call.kwargs)
    inputs, around = call_signature(leaves, spec, SeenModules(call.modules), None)
    modes, settings, modules, *given = around
    tensors = _tensors(leaves, call.modules)
    parts: list[Any] = [
        *_installation(),
        _processes(),
        _devices(tensors),
        settings_of_kernels(),
        call.function,
        (call.loss_alone, call.numbers, call.detached_outputs, call.opaque, call.answered),
        tuple(sorted((strides or {}).items())),
        *inputs,
        *(modes, settings, *modules, *given),
        *_methods(call.modules),
        *traces.patched([type(module) for module in module_names(call.modules).values()]),
        _memory(tensors),
    ]
    return "\n".join(map(naming.of, parts))


def _refuse_what_sees_operators() -> None:
    """Refuse what may change any operator, and is not looked into."""
    if within_modes() or saving_hook() or private.caches_parametrizations():
        raise NotNamed("a mode of PyTorch, or hooks of all modules")


@functools.cache
def _installation() -> tuple[str, ...]:
    """Return what is installed: PyTorch, Python, this package, and when anything last was."""
    here = Path(__file__).parents[2]
    files = [*here.glob("capture/**/*.py"), *here.glob("torch_private/*.py")]
    own = sorted((f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files)
    folders = sorted({Path(entry) for entry in sys.path if Path(entry).name in _PACKAGES})
    installed = [folder.stat().st_mtime_ns for folder in folders if folder.is_dir()]
    return (
        f"tightfit {__version__} {own}",
        f"Python {sys.version} on {platform.machine()}",
        f"torch {torch.__version__} {torch.version.git_version} numpy {numpy.__version__}",
        f"installed {installed}",
        f"told {sorted(pair for pair in os.environ.items() if 'TORCH' in pair[0])}",
    )


def _processes() -> tuple[int, int]:
    """Return which of several processes this is."""
    group = torch.distributed
    if not (group.is_available() and group.is_initialized()):
        return 0, 1
    return group.get_rank(), group.get_world_size()


def _devices(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Return what is known of the GPUs that tensors lie on."""
    devices = dict.fromkeys(t.device for t in tensors if t.is_cuda)
    about = torch.cuda.get_device_name, torch.cuda.get_device_capability
    kinds = tuple(tuple(ask(device) for ask in about) for device in devices)
    return kinds and (*kinds, torch.version.cuda, torch.backends.cudnn.version())


def _methods(modules: Mapping[str, nn.Module]) -> Iterator[Any]:
    """Yield what runs when a module is called: its forward, its hooks."""
    for module in module_names(modules).values():
        own = module.__dict__
        yield type(module).forward
        if "forward" in own and not _is_fitted(own["forward"]):
            yield own["forward"]
        for hooks in HOOKS:
            yield from own[hooks].values()


def _is_fitted(forward: Any) -> bool:
    """Whether a forward is the one that runs planned steps."""
    inner = getattr(forward, "__func__", forward)
    return getattr(inner, "__module__", "").startswith("tightfit.")


def _memory(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Return which tensors lie in one storage, and where in it."""
    numbers: dict[int, int] = {}
    return tuple(
        (
            numbers.setdefault(private.storage_key(tensor), len(numbers)),
            tensor.storage_offset(),
            tensor.untyped_storage().nbytes(),
        )
        for tensor in tensors
    )


def _tensors(leaves: Sequence[Any], modules: Mapping[str, nn.Module]) -> list[torch.Tensor]:
    own = [t for top in modules.values() for t in (*top.parameters(), *top.buffers())]
    return [*own, *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))]
