"""What others may have written down: public names, commands, parameters, names in tables, ops.

The record is `tests/public_face.json`. A change here is a change that users see: write it down
with ``python tests/test_public_face.py`` and in the changelog.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

import torch

import tightfit
from support.commands import every_command, options_of
from tightfit.costs.registry import COST_SOURCES
from tightfit.graph.ir import FORMAT as GRAPH_FORMAT
from tightfit.plan.plan import FORMAT as PLAN_FORMAT
from tightfit.planners.registry import PLANNERS

RECORD = Path(__file__).with_name("public_face.json")

OWN_OPERATORS = ("tightfit::opaque_forward", "tightfit::opaque_backward")


def parameters_of(value: Any) -> list[str]:
    """Return name, kind and default of every parameter; annotations may be spelled otherwise."""
    if value in (tightfit.PlannedStep, tightfit.Online):  # made by `step` and `online` only
        return []
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return []
    texts = (str(p.replace(annotation=inspect.Parameter.empty)) for p in parameters)
    return [re.sub(" at 0x[0-9a-f]+", "", text) for text in texts]


def public_face() -> dict[str, Any]:
    importlib.import_module("tightfit.capture.opaque.tracing")
    registered = {name for name in torch._C._dispatch_get_all_op_names() if "tightfit" in name}
    return {
        "names": {name: parameters_of(getattr(tightfit, name)) for name in tightfit.__all__},
        "commands": {name: options_of(command) for name, command in every_command()},
        "planners": {name: list(entry.options) for name, entry in PLANNERS.items()},
        "costs": list(COST_SOURCES),
        "formats": {"graph": GRAPH_FORMAT, "plan": PLAN_FORMAT},
        "operators": sorted(registered & set(OWN_OPERATORS)),
    }


def test_what_others_have_written_down_still_holds() -> None:
    assert public_face() == json.loads(RECORD.read_text("utf-8"))


if __name__ == "__main__":
    RECORD.write_text(json.dumps(public_face(), indent=1) + "\n", encoding="utf-8")
