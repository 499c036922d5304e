"""The traces that this process has made or read last: a model fitted again takes no new one."""

from __future__ import annotations

from collections import OrderedDict


class RecentTraces:
    """Traces in memory, by their keys; those not used for long make room.

    `most_bytes`: of all of them.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._known: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0

    def find(self, key: str) -> bytes | None:
        """Return a trace that was kept, if it is still there."""
        content = self._known.get(key)
        if content is not None:
            self._known.move_to_end(key)
        return content

    def keep(self, key: str, content: bytes) -> None:
        self._bytes += len(content) - len(self._known.pop(key, b""))
        self._known[key] = content
        while self._bytes > self._most_bytes:
            self._bytes -= len(self._known.popitem(last=False)[1])
