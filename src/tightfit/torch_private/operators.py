"""What PyTorch's tracer does for each operator that it meets."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch._subclasses.functional_tensor import FunctionalTensorMode

__all__ = ["operators_between"]

_OWN = ("aten", "prims")


@contextlib.contextmanager
def operators_between(before: Callable[[], None], after: Callable[[], None]) -> Iterator[None]:
    """Call one function before each of PyTorch's own operators is traced, another one after.

    Operators of others are left out: what traces them may be anybody's code.
    """
    plain = FunctionalTensorMode.__torch_dispatch__

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "namespace", "") not in _OWN:
            return plain(self, func, types, args, kwargs)
        before()
        try:
            return plain(self, func, types, args, kwargs)
        finally:
            after()

    FunctionalTensorMode.__torch_dispatch__ = dispatch
    try:
        yield
    finally:
        FunctionalTensorMode.__torch_dispatch__ = plain
