"""Contents that stay: brought back for good, or about to be written over."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tightfit.dynamic.contents import Contents
from tightfit.dynamic.history import Content
from tightfit.dynamic.pool import Pool
from tightfit.dynamic.repeater import Repeater
from tightfit.dynamic.room import Room
from tightfit.torch_private.storages import copy_of


class Settled:
    """Makes contents stay, so that nothing has to compute them again.

    `contents`: which content is in which storage. `pool`: contents that may be evicted. `repeater`:
    brings them back.
    """

    def __init__(self, room: Room, contents: Contents, pool: Pool, repeater: Repeater) -> None:
        self._room = room
        self._contents = contents
        self._pool = pool
        self._repeater = repeater
        self._copy_bytes = 0

    def expect_writes(self, size_bytes: int) -> None:
        """Note how many bytes are about to be overwritten, as by an optimizer; 0: none any more."""
        self._copy_bytes = size_bytes

    def settle(self, content: Content) -> None:
        """Bring a content back, to stay: how it was computed is forgotten."""
        if content.maker is None:
            return
        self._repeater.bring_back(content)
        storage = content.memory
        self._pool.withdraw(content)
        content.stay()
        if storage is not None:
            for reader in content.readers:
                reader.keep(content, storage)

    def settle_all(self, contents: Iterable[Content]) -> None:
        """Bring contents back, to stay."""
        for content in [*contents]:
            self.settle(content)

    def protect_readers(self, content: Content, storage: torch.UntypedStorage) -> None:
        """Make contents that were computed from an overwritten content independent of it.

        Those that the program holds are brought back to stay, if they are less than a copy of the
        content; or else they get a copy of it.
        """
        if next(content.readers, None) is None:
            return
        most_bytes = max(content.size_bytes, self._copy_bytes)
        self.settle_all(_held_after(content, most_bytes) or ())
        readers = [*content.readers]
        if readers:
            content.move(self._room.in_room(lambda: copy_of(storage)))
            for reader in readers:
                reader.drop(content)
            self._contents.put(storage, Content(storage.nbytes(), None))


def _held_after(content: Content, most_bytes: int) -> list[Content] | None:
    """Contents that the program holds, computed from a content; None above so many bytes."""
    found: dict[Content, None] = {}
    front, size_bytes = [content], 0
    while front:
        for call in front.pop().readers:
            for output in call.outputs:
                if output is not None and output.maker is not None and output not in found:
                    found[output] = None
                    front.append(output)
                    size_bytes += output.size_bytes if output.is_held else 0
        if size_bytes > most_bytes:
            return None
    return [output for output in found if output.is_held]
