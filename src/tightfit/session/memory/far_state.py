"""An optimizer's state in far memory: mapped from files, so that its pages are the system's."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tightfit.capture.nodes import is_without_gaps
from tightfit.errors import OffloadFailed
from tightfit.execution.far.offload import Offload
from tightfit.session.memory.forecast import FAR_BYTES, tensors_in
from tightfit.units import format_bytes

_DONTNEED = 4  # of Linux's madvise
_DESCRIPTORS = Path("/proc/self/fd")


def is_mapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor is mapped from a file: no allocator has given it out."""
    return _is_plain(tensor) and tensor.untyped_storage().filename is not None


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is an ordinary tensor of the CPU: dense, of no class of its own."""
    is_dense = type(tensor) is torch.Tensor and tensor.layout == torch.strided
    return is_dense and tensor.device.type == "cpu"


class FarState:
    """The large tensors of an optimizer's state, each mapped from a file without a name.

    The optimizer reads and writes them as any tensor. The system writes their pages to the disk
    where it needs the room, and they leave the process after each step.

    `offload`: the folder, and how much may be there.
    """

    def __init__(self, optimizer: Any, offload: Offload) -> None:
        self._optimizer = optimizer
        self._offload = offload

    def keep_all(self) -> None:
        """Move all state that exists; see `keep`."""
        for state in self._optimizer.state.values():
            self.keep(state)

    def held_bytes(self) -> int:
        states = self._optimizer.state.values()
        return sum(t.nbytes for state in states for t in tensors_in(state) if is_mapped(t))

    def empty_like(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of the same shape, without gaps: in far memory unless it is small.

        Raises `OffloadFailed` if there is no room for it.
        """
        size = tensor.numel() * dtype.itemsize
        if size < FAR_BYTES or tensor.device.type != "cpu":
            return torch.empty_like(tensor, dtype=dtype, requires_grad=False)
        held_bytes = self.held_bytes()
        if held_bytes + size > self._offload.size_bytes:
            raise self._failed(f"{format_bytes(held_bytes)} are there already", size)
        try:
            flat = _mapped(self._offload.place, tensor.numel(), dtype)
        except OSError as error:
            raise self._failed(error.strerror or repr(error), size) from error
        return flat.as_strided(tensor.shape, tensor.stride())

    def keep(self, state: Any) -> None:
        """Move the large tensors of a parameter's state there, if they are not; free their pages.

        Raises `OffloadFailed` if there is no room for them: the state stays as it is.
        """
        for tensor in _large(state):
            if not is_mapped(tensor):
                tensor.set_(self.empty_like(tensor, tensor.dtype).copy_(tensor))
            _drop_pages(tensor)

    def _failed(self, why: str, size: int) -> OffloadFailed:
        return OffloadFailed(
            f"there is no room for {format_bytes(size)} more of the optimizer's state in far "
            f"memory in {self._offload.place} ({why}; offload="
            f"{format_bytes(self._offload.size_bytes)}). Parameters whose state is there were "
            "stepped. Way out: a larger offload=, or a folder with more room "
            "(tightfit.Offload(size, folder=...))"
        )


def _large(state: Any) -> Iterator[torch.Tensor]:
    for tensor in tensors_in(state):
        is_large = _is_plain(tensor) and tensor.nbytes >= FAR_BYTES
        if is_large and is_without_gaps(tensor) and tensor.storage_offset() == 0:
            yield tensor


def _mapped(folder: Path, elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers mapped from a new file, which goes with them."""
    with tempfile.NamedTemporaryFile(dir=folder, buffering=0, delete=False) as file:
        name = Path(file.name)
        try:
            if _DESCRIPTORS.is_dir():  # the file need not have a name meanwhile
                name.unlink()
                name = _DESCRIPTORS / str(file.fileno())
            _fill(file.fileno(), elements * dtype.itemsize)
            return torch.from_file(str(name), shared=True, size=elements, dtype=dtype)
        finally:
            if name.parent != _DESCRIPTORS:
                name.unlink()


def _fill(descriptor: int, size: int) -> None:
    """Have a file take its room on the disk now: later there is no way to say that it is full."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
        return
    zeros = bytes(1 << 20)
    while size:
        size -= os.write(descriptor, zeros[:size])


def _drop_pages(tensor: torch.Tensor) -> None:
    """Have the pages of a mapped tensor leave the process; data written stays in the file."""
    if sys.platform == "linux":
        address, size = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes)
        _c_library().madvise(address, size, _DONTNEED)  # only a hint: it may fail


@functools.cache
def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)
