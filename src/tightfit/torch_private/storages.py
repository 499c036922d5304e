"""Storages whose memory is taken away and given back under the tensors that use them.

Private names of torch. A storage without memory keeps its size, so views of it can be made. Every
access to its memory raises torch's error.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from tightfit.torch_private.patches import replaced

storage_of: Callable[[torch.Tensor], torch.UntypedStorage] = torch._C.TensorBase.untyped_storage  # type: ignore[attr-defined]
"""The storage of a tensor, also while `observed_addresses` listens."""

address_of: Callable[[torch.Tensor], int] = torch._C.TensorBase.data_ptr  # type: ignore[attr-defined]
"""The address of a tensor, also while `observed_addresses` listens."""

_SEEN_BYTES = 120  # of c10's StorageImpl: its flags are well before that


@functools.cache
def memory_obstacle() -> str | None:
    """Return why memory cannot be taken from storages on this release; None if it can."""
    if not hasattr(torch._C, "_construct_storage_from_data_pointer"):
        return "storages around a pointer cannot be made"
    if _flags() is None:
        return "the flags of a storage are elsewhere"
    storage = torch.UntypedStorage(64)
    tensor = torch.empty(0, dtype=torch.uint8).set_(storage)
    take_memory(storage)
    try:
        tensor.sum()
    except RuntimeError:
        return None if storage.nbytes() == 64 else "a storage without memory loses its size"
    return "reading a storage without memory is no error"


@functools.cache
def _flags() -> tuple[int, int] | None:
    """Where a storage says 'look before you read', and 'reading is an error'.

    Four flags are adjacent: look; writing is an error; reading is; writing warns. Setting the
    second and the fourth shows where.
    """
    storage = torch.UntypedStorage(64)
    tensor = torch.empty(0, dtype=torch.uint8).set_(storage)
    plain = ctypes.string_at(storage._cdata, _SEEN_BYTES)
    torch._C._set_throw_on_mutable_data_ptr(tensor)
    guarded = ctypes.string_at(storage._cdata, _SEEN_BYTES)
    torch._C._set_warn_deprecated_on_mutable_data_ptr(tensor)
    warned = ctypes.string_at(storage._cdata, _SEEN_BYTES)
    first = [n for n in range(_SEEN_BYTES) if plain[n] != guarded[n]]
    then = [n for n in range(_SEEN_BYTES) if guarded[n] != warned[n]]
    if len(first) != 2 or then != [first[0] + 3] or first[1] != first[0] + 1:
        return None
    return first[0], first[0] + 2


def take_memory(storage: torch.UntypedStorage) -> None:
    """Free the memory of a storage; reading or writing it is an error from now on."""
    flags = _flags()
    assert flags is not None
    nothing = torch._C._construct_storage_from_data_pointer(0, storage.device, storage.nbytes())
    for flag in flags:
        ctypes.memset(nothing._cdata + flag, 1, 1)
    exchange_memory(storage, nothing)


def exchange_memory(storage: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    """Exchange the memory of two storages of one size, and all that says how it may be used.

    PyTorch 2.11 has no function for it: there the bytes of both are exchanged, from the pointer to
    the allocator, which follows the flags.
    """
    if hasattr(torch.UntypedStorage, "_swap_data_ptr_"):
        storage._swap_data_ptr_(other)
        return
    begin, size = _owned()
    places = storage._cdata + begin, other._cdata + begin
    first, second = (ctypes.string_at(place, size) for place in places)
    ctypes.memmove(places[0], second, size)
    ctypes.memmove(places[1], first, size)


@functools.cache
def _owned() -> tuple[int, int]:
    """The place and number of the bytes of a storage that describe its memory."""
    flags = _flags()
    assert flags is not None
    storage = torch.UntypedStorage(64)
    begin = ctypes.string_at(storage._cdata, _SEEN_BYTES).index(
        storage.data_ptr().to_bytes(_WORD_BYTES, sys.byteorder)
    )
    allocator = -(-(flags[1] + 2) // _WORD_BYTES) * _WORD_BYTES  # behind one flag more
    return begin, allocator + _WORD_BYTES - begin


_WORD_BYTES = ctypes.sizeof(ctypes.c_void_p)


@contextlib.contextmanager
def below_autograd() -> Iterator[None]:
    """Let operators run once more as they ran below autograd and autocast."""
    with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
        yield


@contextlib.contextmanager
def below_modes() -> Iterator[None]:
    """Let operators run unseen by any mode, as they run below autograd and autocast."""
    with _disable_current_modes(), below_autograd():
        yield


def new_memory(size_bytes: int, device: torch.device) -> torch.UntypedStorage:
    """Return a storage of the allocator that operators ask, whose limit holds for it."""
    return storage_of(torch.empty(size_bytes, dtype=torch.uint8, device=device))


def in_use(reference: StorageWeakRef) -> torch.UntypedStorage | None:
    """Return a storage that is held weakly; None if nothing uses it any more."""
    return torch.UntypedStorage._new_with_weak_ptr(reference.cdata)  # type: ignore[attr-defined]


def shares_storage(tensor: torch.Tensor) -> bool:
    """Whether other tensors may use the storage of a tensor."""
    return is_used_beyond(tensor.untyped_storage(), 1)


def is_used_beyond(storage: torch.UntypedStorage, tensors: int) -> bool:
    """Whether more than so many tensors use a storage; `storage`: the only such object."""
    uses = torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]
    return uses > tensors + 1  # and the object that is asked


def copy_of(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Return a copy in such memory."""
    return new_memory(storage.nbytes(), storage.device).copy_(storage)


def free_failed_backward() -> None:
    """Free the graph of a backward that has raised: the engine holds it until another runs."""
    with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
        torch.ones((), requires_grad=True).backward()


_TENSOR_METHODS = ("numpy", "data_ptr", "untyped_storage", "tolist", "__repr__", "__dlpack__")
_FUNCTIONS = ((torch, "to_dlpack"), (torch.utils.dlpack, "to_dlpack"))
_HANDED_OUT = ("numpy", "data_ptr", "untyped_storage", "__dlpack__", "to_dlpack")


@contextlib.contextmanager
def intercepted_resizing(
    callback: Callable[[torch.UntypedStorage, Callable[[], Any]], Any],
) -> Iterator[None]:
    """Let a function give a storage another size, where that happens without the dispatcher.

    It gets the storage and the function that resizes it.
    """
    resize = torch.UntypedStorage.resize_

    def telling(storage: Any, size: int) -> Any:
        return callback(storage, lambda: resize(storage, size))

    with replaced(torch.UntypedStorage, resize_=telling):
        yield


@contextlib.contextmanager
def observed_addresses(callback: Callable[[torch.Tensor, bool], None]) -> Iterator[None]:
    """Call a function before the memory of a tensor is read without the dispatcher.

    NumPy, printing, saving and the like. The second argument says whether the address is handed
    out, so that the memory must stay where it is as long as the tensor lives.
    """
    places: list[tuple[Any, str]] = [(torch.Tensor, name) for name in _TENSOR_METHODS]
    places += [(module, name) for module, name in _FUNCTIONS if hasattr(module, name)]
    with contextlib.ExitStack() as stack:
        for owner, name in places:
            told = _with_callback(getattr(owner, name), name in _HANDED_OUT, callback)
            stack.enter_context(replaced(owner, **{name: told}))
        yield


def _with_callback(
    function: Callable[..., Any], hands_out: bool, callback: Callable[[torch.Tensor, bool], None]
) -> Callable[..., Any]:
    @functools.wraps(function)
    def telling(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensor, torch.Tensor):
            callback(tensor, hands_out)
        return function(tensor, *args, **kwargs)

    return telling
