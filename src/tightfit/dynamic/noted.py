"""The arguments of a call about to run: contents it reads, contents it overwrites."""

from __future__ import annotations

from typing import Any

import torch

from tightfit.dynamic.contents import Contents
from tightfit.dynamic.history import Blank, Call, Content, Place
from tightfit.dynamic.operators import Operator


class Noted:
    """The arguments of a call, with places for tensors.

    `contents`: maps a tensor to its content.
    """

    __slots__ = ("_contents", "_written", "args", "kwargs", "reads", "repeats", "unread")

    def __init__(
        self,
        contents: Contents,
        operator: Operator,
        args: Any,
        kwargs: Any,
        overwritten: list[torch.Tensor],
    ) -> None:
        self.reads: dict[Content, torch.UntypedStorage] = {}
        self.repeats = operator.repeats and not operator.makes_blank
        if operator.written_unsaid:
            self.repeats = self.repeats and operator.repeats_with(args, kwargs)
        self.unread: dict[Content, torch.UntypedStorage] = {}
        self._contents = contents
        self._written: dict[int, tuple[Content | Blank, torch.UntypedStorage]] = {}
        if not overwritten:
            self.args = self._all_noted(args)
            self.kwargs = kwargs and {name: self._noted(v) for name, v in kwargs.items()}
            return
        names = {a.position: a.name for a in (*operator.written, *operator.statistics)}
        unread = operator.unread(args, kwargs)
        self.args = [
            self._argument(value, unread.get(names.get(n, ""))) for n, value in enumerate(args)
        ]
        self.kwargs = {
            name: self._argument(value, unread.get(name)) for name, value in kwargs.items()
        }
        for tensor in overwritten:
            self._overwrites(*contents.content_in(tensor))

    @property
    def written(self) -> list[torch.UntypedStorage]:
        """The storages whose content is computed again."""
        return [storage for _, storage in self._written.values()] if self._written else []

    def call(
        self,
        function: Any,
        cost: int,
        drawn_from: tuple[torch.Generator, torch.Tensor] | None,
        with_grad: bool,
    ) -> Call:
        """Return the call to run it again."""
        given = self.args, self.kwargs, self.reads
        call = Call(function, *given, cost, with_grad)
        call.drawn_from = drawn_from
        if self._written:
            call.written = [content for content, _ in self._written.values()]
        return call

    def fix(self, dtype: torch.dtype) -> None:
        """Give tensors computed without inputs this type, also if the default changes later."""
        if not self.reads and self.kwargs.get("dtype") is None:
            self.kwargs = {**self.kwargs, "dtype": dtype}

    def _all_noted(self, values: Any) -> list[Any]:
        noted: list[Any] = []
        for value in values:
            if isinstance(value, torch.Tensor):
                content, storage = self._contents.content_in(value)
                self.reads[content] = storage
                noted.append(Place(content, value))
            elif isinstance(value, list | tuple):
                noted.append(self._all_noted(value))
            else:
                noted.append(value)
        return noted

    def _noted(self, value: Any) -> Any:
        return self._all_noted((value,))[0]

    def _argument(self, value: Any, unread: str | None) -> Any:
        """Return a place for an argument, or a blank if its content is not read."""
        if unread is None or not isinstance(value, torch.Tensor):
            return self._noted(value)
        content, storage = self._contents.content_in(value)
        blank = Blank(Place(content, value), value.device)
        if unread == "statistics":
            return blank
        whole = value.numel() * value.element_size() == storage.nbytes()
        if not whole or (content.maker is None and not content.is_blank):
            return self._noted(value)
        self._written[storage._cdata] = blank, storage
        self.unread[content] = storage
        return blank

    def _overwrites(self, content: Content, storage: torch.UntypedStorage) -> None:
        """Note a content that is read and overwritten: its maker is needed to repeat anything."""
        if content in self.reads and storage._cdata not in self._written:
            self._written[storage._cdata] = content, storage
            self.repeats = self.repeats and content.maker is not None
