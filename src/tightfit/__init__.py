"""Train any PyTorch model inside a memory budget given in bytes, at the least extra compute."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tightfit.version import __version__ as __version__

if TYPE_CHECKING:
    from tightfit.api.arena import arena
    from tightfit.api.check import Check, check, minimum_budget
    from tightfit.api.fit import fit, prepare, report, step, unfit
    from tightfit.api.max_batch import MaxBatch, max_batch_size
    from tightfit.api.online import online
    from tightfit.api.prove import prove
    from tightfit.api.report import Report
    from tightfit.arenas.arena import Arena, ArenaReport
    from tightfit.capture.opaque.mark import opaque
    from tightfit.dynamic.ledger import OnlineReport
    from tightfit.dynamic.region import Online
    from tightfit.errors import (
        BadInput,
        BudgetExceeded,
        CaptureError,
        InfeasibleBudget,
        PlanMismatch,
        SecondForward,
        TightfitError,
    )
    from tightfit.execution.far.offload import Offload
    from tightfit.session.handles import PlannedStep
    from tightfit.session.memory.budget import Budget
    from tightfit.studies.proof import Proof

_HOMES = {
    "Arena": "tightfit.arenas.arena",
    "ArenaReport": "tightfit.arenas.arena",
    "arena": "tightfit.api.arena",
    "Budget": "tightfit.session.memory.budget",
    "MaxBatch": "tightfit.api.max_batch",
    "max_batch_size": "tightfit.api.max_batch",
    "Check": "tightfit.api.check",
    "check": "tightfit.api.check",
    "minimum_budget": "tightfit.api.check",
    "PlannedStep": "tightfit.session.handles",
    "fit": "tightfit.api.fit",
    "prepare": "tightfit.api.fit",
    "report": "tightfit.api.fit",
    "step": "tightfit.api.fit",
    "unfit": "tightfit.api.fit",
    "Offload": "tightfit.execution.far.offload",
    "Online": "tightfit.dynamic.region",
    "OnlineReport": "tightfit.dynamic.ledger",
    "online": "tightfit.api.online",
    "opaque": "tightfit.capture.opaque.mark",
    "Proof": "tightfit.studies.proof",
    "prove": "tightfit.api.prove",
    "Report": "tightfit.api.report",
    "BadInput": "tightfit.errors",
    "BudgetExceeded": "tightfit.errors",
    "CaptureError": "tightfit.errors",
    "InfeasibleBudget": "tightfit.errors",
    "PlanMismatch": "tightfit.errors",
    "SecondForward": "tightfit.errors",
    "TightfitError": "tightfit.errors",
}

__all__ = [
    "Arena",
    "ArenaReport",
    "BadInput",
    "Budget",
    "BudgetExceeded",
    "CaptureError",
    "Check",
    "InfeasibleBudget",
    "MaxBatch",
    "Offload",
    "Online",
    "OnlineReport",
    "PlanMismatch",
    "PlannedStep",
    "Proof",
    "Report",
    "SecondForward",
    "TightfitError",
    "arena",
    "check",
    "fit",
    "max_batch_size",
    "minimum_budget",
    "online",
    "opaque",
    "prepare",
    "prove",
    "report",
    "step",
    "unfit",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that files need no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'tightfit' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
