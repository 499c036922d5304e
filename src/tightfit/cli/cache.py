"""``tightfit cache``: plans that were found, to look at, to delete, to give and to take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from tightfit.cli.options import Json
from tightfit.cli.output import print_result
from tightfit.errors import BadInput
from tightfit.files import cache_folder
from tightfit.plan.cache import CacheFile, PlanCache
from tightfit.plan.shared import load_shared, save_shared
from tightfit.reporting.text import render_table
from tightfit.units import format_bytes, format_percent
from tightfit.version import __version__

_SUFFIXES = (".json", ".json.gz")
_SHORT = 12
"""Letters of a name that are shown, and that are enough to name a plan."""

cache = App(
    name="cache",
    group="Plans",
    help="Plans kept on disk: list, delete, give to others, take in.",
    help_epilogue="",  # not that of commands that take a model
)


@cache.command(name="ls")
def list_plans(*, json: Json = False) -> int:
    """List the plans that are kept, those used last first.

    ```sh
    tightfit cache ls
    ```
    """
    store = PlanCache()
    plans = store.kept()
    rows = [
        (
            _short(kept),
            kept.entry.key.name or "-",
            kept.entry.key.device or "-",
            format_bytes(_budget(kept)),
            format_percent(kept.entry.outcome.overhead),
            f"{max(0.0, time.time() - kept.used_s) / 86400:.1f} d",
            "imported" if kept.imported else "found here",
        )
        for kept in plans
    ]
    header = ["plan", "model", "device", "budget", "extra compute", "used", "from"]
    total = sum(kept.size_bytes for kept in plans)
    text = f"{len(plans)} plans, {format_bytes(total)}, in {store.folder}"
    others = _other_files()
    size = sum(path.stat().st_size for path in others)
    text += f"\n{len(others)} traces and plans to begin with, {format_bytes(size)}, in addition"
    if rows:
        text = f"{render_table(header, rows, text_columns=3)}\n\n{text}"
    return print_result(
        text,
        as_json=json,
        status="feasible",
        folder=str(store.folder),
        plans=[_described(kept) for kept in plans],
        beside_bytes=size,
    )


@cache.command(name="rm")
def remove(
    *plans: str,
    everything: Annotated[bool, Parameter(name="--all", negative="")] = False,
    json: Json = False,
) -> int:
    """Delete plans; a step whose plan is gone is planned again.

    With all of them go the traces of steps and the plans that a next process would begin with.

    ```sh
    tightfit cache rm 3f2a
    tightfit cache rm --all
    ```

    Parameters
    ----------
    plans
        The first letters of each, as tightfit cache ls shows them.
    everything
        Delete all of them.
    """
    if everything == bool(plans):
        raise BadInput("name plans as tightfit cache ls shows them, or give --all")
    store = PlanCache()
    removed = store.remove(kept.name for kept in _chosen(store, plans))
    for path in _other_files() if everything else ():
        path.unlink(missing_ok=True)
    return print_result(
        f"{removed} plans are deleted", as_json=json, status="feasible", removed=removed
    )


@cache.command(name="export")
def export(file: Path, /, *plans: str, json: Json = False) -> int:
    """Write plans into one file, for colleagues and CI.

    ```sh
    tightfit cache export plans.json.gz
    ```

    Parameters
    ----------
    file
        The file to write (.json or .json.gz).
    plans
        The first letters of each, as tightfit cache ls shows them; none: all.
    """
    if not file.name.endswith(_SUFFIXES):
        raise BadInput(f"{str(file)!r} must end in {' or '.join(_SUFFIXES)}")
    store = PlanCache()
    chosen = [kept.entry for kept in _chosen(store, plans) if kept.entry.key.graph]
    if not chosen:
        raise BadInput(f"there is no plan to export in {store.folder}: train or plan first")
    save_shared(file, chosen, made_with=f"tightfit {__version__}")
    size = file.stat().st_size
    return print_result(
        f"{file}: {len(chosen)} plans, {format_bytes(size)}; others take them in with\n"
        f"  tightfit cache import {file}",
        as_json=json,
        status="feasible",
        file=str(file),
        exported=len(chosen),
    )


@cache.command(name="import")
def take_in(file: Path, /, *, json: Json = False) -> int:
    """Take in plans from a file: they serve for the same step on such a device, within the budget.

    Each plan is verified against the current step before it runs. Where it needs more memory than
    on the machine that exported it, the step is planned again.

    ```sh
    tightfit cache import plans.json.gz
    ```

    Parameters
    ----------
    file
        A file that tightfit cache export wrote.
    """
    found = load_shared(file)
    store = PlanCache()
    count = store.take_in(found.plans)
    return print_result(
        f"{count} plans are taken into {store.folder}",
        as_json=json,
        status="feasible",
        imported=count,
        made_with=found.made_with,
    )


def _other_files() -> list[Path]:
    """Return the files that only serve the next process on this machine."""
    return [path for kind in ("traces", "earlier") for path in cache_folder(kind).glob("*.gz")]


def _chosen(store: PlanCache, names: Sequence[str]) -> list[CacheFile]:
    """Return the plans that were named; all if none was."""
    plans = store.kept()
    for name in names:
        if not any(_is(kept, name) for kept in plans):
            raise BadInput(f"no plan is called {name!r}: see tightfit cache ls")
    return [kept for kept in plans if not names or any(_is(kept, name) for name in names)]


def _short(kept: CacheFile) -> str:
    return kept.name.rpartition("-")[2][:_SHORT]


def _is(kept: CacheFile, name: str) -> bool:
    return kept.name.rpartition("-")[2].startswith(name)


def _budget(kept: CacheFile) -> int:
    plan = kept.entry.outcome.plan
    return plan.budget_bytes if plan is not None else kept.entry.key.budget_bytes


def _described(kept: CacheFile) -> dict[str, object]:
    return {
        "plan": kept.name,
        "model": kept.entry.key.name,
        "device": kept.entry.key.device,
        "budget_bytes": _budget(kept),
        "peak_bytes": kept.entry.outcome.peak_bytes,
        "overhead": kept.entry.outcome.overhead,
        "size_bytes": kept.size_bytes,
        "imported": kept.imported,
    }
