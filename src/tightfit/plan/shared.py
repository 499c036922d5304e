"""Files of plans that people share: several outcomes, each with its key."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tightfit.errors import BadInput
from tightfit.files import decode_record, encode_record, read_limited, write_atomically
from tightfit.plan.cache import CachedPlan

_FORMAT = 1
_NAME = re.compile(r"[0-9a-z_]+")


class SharedPlans(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    plans: tuple[CachedPlan, ...]
    made_with: str = ""  # the versions with which they were found, for people
    format: int = _FORMAT


def save_shared(path: Path | str, plans: Sequence[CachedPlan], *, made_with: str = "") -> None:
    """Write plans to a ``.json`` or ``.json.gz`` file, all or nothing."""
    write_atomically(path, encode_record(SharedPlans(plans=tuple(plans), made_with=made_with)))


def load_shared(path: Path | str) -> SharedPlans:
    """Return the plans in a file; each is to be verified against its graph before it runs.

    Raises `BadInput` if the file cannot be read, is none of plans, or a plan in it names another
    graph than it is kept for.
    """
    found = decode_record(read_limited(path), SharedPlans, source=str(path), newest=_FORMAT)
    for entry in found.plans:
        if not _NAME.fullmatch(entry.key.graph) or not _NAME.fullmatch(entry.key.device):
            raise BadInput(f"{path}: {entry.key.graph!r} is no fingerprint of a graph")
        if entry.outcome.plan is None or entry.outcome.plan.graph != entry.key.graph:
            raise BadInput(f"{path}: the plan of {entry.key.name!r} does not belong to its graph")
    return found
