"""Calls that await their backward, as those know them that divide a budget among them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Call"]


@dataclass(eq=False)
class Call:
    """A call that awaits its backward."""

    is_open: bool = True
    is_freed: bool = False
