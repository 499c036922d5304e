"""Entry points for other libraries: without effect unless ``TIGHTFIT_BUDGET`` is set.

``TIGHTFIT_BUDGET=8GiB python train.py`` gives every trainer of Lightning its callback.
"""

from __future__ import annotations

import os
from typing import Any

__all__ = ["lightning_callbacks"]


def lightning_callbacks() -> list[Any]:
    """Return the callback of Lightning if a budget is set."""
    budget = os.environ.get("TIGHTFIT_BUDGET")
    if not budget:
        return []
    from tightfit.integrations.lightning import Budget

    return [Budget(budget)]
