"""Plan files: strict, versioned JSON, described in ``docs/plan-format.md``; never pickle."""

from __future__ import annotations

from pathlib import Path

from tightfit.files import decode_record, encode_record, read_limited, write_atomically
from tightfit.plan.plan import FORMAT, Plan


def plan_to_json(plan: Plan) -> bytes:
    """Return a plan as JSON text; equal plans give equal bytes."""
    return encode_record(plan)


def plan_from_json(content: bytes, *, source: str = "the plan") -> Plan:
    """Return the plan a JSON text describes, not yet verified against a graph.

    `source`: where the text comes from; named in errors. Raises `BadInput` if the text is no plan
    of a format this version reads.
    """
    return decode_record(content, Plan, source=source, newest=FORMAT)


def load_plan(path: Path | str) -> Plan:
    """Return the plan in a ``.json`` or ``.json.gz`` file; `verify` it against its graph.

    Raises `BadInput` if the file cannot be read or is no plan.
    """
    return plan_from_json(read_limited(path), source=str(path))


def save_plan(plan: Plan, path: Path | str) -> None:
    """Write a plan to a ``.json`` or ``.json.gz`` file, all or nothing."""
    write_atomically(path, plan_to_json(plan))
