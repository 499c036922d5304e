"""Conditions of every trace: installed packages, devices, settings, memory."""

from __future__ import annotations

import functools
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

from tightfit.torch_private import core as private
from tightfit.torch_private.saving import saving_hook
from tightfit.torch_private.settings import settings_of_kernels, within_modes
from tightfit.version import __version__

_PACKAGES = ("site-packages", "dist-packages")


def installation(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Return the machine and the settings of this process.

    `tensors`: all that a step is given: their devices count.
    """
    return (*_installed(), _processes(), _devices(tensors), settings_of_kernels())


def sees_operators() -> bool:
    """Whether something is around that may change any operator, and is not looked into."""
    return bool(within_modes() or saving_hook() or private.caches_parametrizations())


def memory_of(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Return which tensors share a storage, and where in it."""
    numbers: dict[int, int] = {}
    return tuple(
        (
            numbers.setdefault(private.storage_key(tensor), len(numbers)),
            tensor.storage_offset(),
            tensor.untyped_storage().nbytes(),
        )
        for tensor in tensors
    )


@functools.cache
def _installed() -> tuple[str, ...]:
    """Return installed versions: PyTorch, Python, this package, and the last installation."""
    here = Path(__file__).parents[2]
    rooms = ("capture/**/*.py", "dynamo/*.py", "torch_private/*.py")
    files = [file for room in rooms for file in here.glob(room)]
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
    group = torch.distributed
    if not (group.is_available() and group.is_initialized()):
        return 0, 1
    return group.get_rank(), group.get_world_size()


def _devices(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    devices = dict.fromkeys(t.device for t in tensors if t.is_cuda)
    about = torch.cuda.get_device_name, torch.cuda.get_device_capability
    kinds = tuple(tuple(ask(device) for ask in about) for device in devices)
    return kinds and (*kinds, torch.version.cuda, torch.backends.cudnn.version())
