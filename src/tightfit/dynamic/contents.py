"""Which content is in which storage, for as long as the program holds the storage."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

from tightfit.dynamic.history import MARK, Content, StorageMark
from tightfit.dynamic.pool import Pool
from tightfit.dynamic.room import Room, allocated_bytes
from tightfit.torch_private.storages import storage_of


class NotPlain(Exception):
    """A tensor that sizes and strides of one storage do not describe, such as a sparse one."""


class Contents:
    """The contents of all storages that are known.

    `room`: notified when a storage ends that existed before. `pool`: notified of contents that come
    and go.
    """

    def __init__(self, room: Room, pool: Pool) -> None:
        self._room = room
        self._pool = pool
        self._ended: deque[StorageMark] = deque()
        self._held: dict[Content, None] = {}
        self._before: dict[Content, int] = {}

    def mark_existing(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Note storages that exist before the region: they stay where they are."""
        for storage in storages:
            content = self.put(storage, Content(storage.nbytes(), None))
            self._before[content] = allocated_bytes(storage)

    def of_tensor(self, tensor: torch.Tensor) -> Content | None:
        try:
            return self.of_storage(_plain_storage_of(tensor))
        except NotPlain:
            return None

    def of_storage(self, storage: torch.UntypedStorage) -> Content | None:
        mark = getattr(storage, MARK, None)
        return None if mark is None else mark.content

    def content_in(self, tensor: torch.Tensor) -> tuple[Content, torch.UntypedStorage]:
        """Return the content and the storage of a tensor; a new content stays where it is.

        Raises `NotPlain` if it has no storage.
        """
        storage = _plain_storage_of(tensor)
        mark = getattr(storage, MARK, None)
        if mark is not None:
            return mark.content, storage
        return self.put(storage, Content(storage.nbytes(), None)), storage

    def put(self, storage: torch.UntypedStorage, content: Content) -> Content:
        """Note a storage that holds something new, or is met for the first time."""
        mark: StorageMark | None = getattr(storage, MARK, None)
        if mark is None:
            return self.put_first(storage, content)
        old = mark.content
        for reader in old.readers:
            reader.drop(old)
        self._lost(old)
        mark.becomes(content)
        if old in self._before:
            self._before[content] = self._before.pop(old)
        self._held[content] = None
        if self._room.has(storage):
            self._pool.offer(content)
        return content

    def put_first(self, storage: torch.UntypedStorage, content: Content) -> Content:
        """Note a storage that is met for the first time."""
        mark = StorageMark(storage, self._ended.append)
        mark.becomes(content)
        setattr(storage, MARK, mark)
        self._held[content] = None
        self._pool.offer(content)
        return content

    def new_among(self, outputs: Any) -> list[torch.UntypedStorage]:
        """Return the new storages of results, each once.

        Raises `NotPlain` if a result has no storage.
        """
        here = self._room.device
        found: dict[int, torch.UntypedStorage] = {}
        for tensor in (outputs,) if isinstance(outputs, torch.Tensor) else tensors_in(outputs):
            storage = _plain_storage_of(tensor)
            if not hasattr(storage, MARK) and tensor.device == here and storage.nbytes():
                found[storage._cdata] = storage
        return [*found.values()]

    def process_frees(self) -> None:
        """Note storages that the program has freed since the last call."""
        while self._ended:
            content = self._ended.popleft().content
            self._lost(content)
            size_bytes = self._before.pop(content, 0)
            if size_bytes:
                self._room.note_earlier_freed(size_bytes)

    def computed(self) -> list[Content]:
        """Return contents that are held and could be computed again."""
        return [content for content in self._held if content.maker is not None]

    def weights(self) -> tuple[int, int]:
        """Return the resident bytes that stay for ever, and the other resident bytes."""
        resident = [c for c in self._held if c.is_resident and self._is_on_device(c)]
        kept_bytes = sum(c.size_bytes for c in resident if c.maker is None)
        return kept_bytes, sum(c.size_bytes for c in resident) - kept_bytes

    def _is_on_device(self, content: Content) -> bool:
        storage = content.memory
        return storage is not None and self._room.has(storage)

    def close(self) -> None:
        """Take the marks off the storages."""
        for content in self._held:
            storage = content.memory
            if storage is not None and hasattr(storage, MARK):
                delattr(storage, MARK)
            content.lose_storage()
        self._held.clear()

    def _lost(self, content: Content) -> None:
        self._held.pop(content, None)
        if content.is_private:
            return
        if content.is_resident:
            self._pool.ended(content)
            return
        content.lose_storage()
        if content.maker is not None:
            content.maker.release_reads()


def _plain_storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    if tensor.is_quantized or tensor.is_nested:
        raise NotPlain
    try:
        return storage_of(tensor)
    except (NotImplementedError, RuntimeError):
        raise NotPlain from None


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors among the arguments or results of an operator."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, list | tuple):
        return [tensor for each in tree for tensor in tensors_in(each)]
    return []
