"""A fitted callable: which way it runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tightfit.session.whole.steps import Session

__all__ = ["PlannedStep", "prepare_all"]


class PlannedStep:
    """A callable that runs its function as a planned step; made by `step`."""

    _torchdynamo_disable = True

    def __init__(self, session: Session) -> None:
        self._session = session

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one planned forward; call ``backward()`` on what it returns."""
        return self._session(args, kwargs)


def prepare_all(session: Session, shapes: Iterable[Any]) -> None:
    """Plan for example inputs; a session that cannot takes no part in a shared budget."""
    try:
        session.prepare_all(shapes)
    except BaseException:
        session.leave()
        raise
