"""Turn a target and a budget named on the command line into a graph and bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tightfit.cli.options import StepOptions, is_model
from tightfit.costs import with_costs
from tightfit.errors import BadInput
from tightfit.graph.io import load_graph
from tightfit.graph.ir import Exactness, Graph
from tightfit.graph.liveness import budget_of_ratio
from tightfit.plan.plan import Gradients
from tightfit.progress import Progress
from tightfit.units import parse_bytes

if TYPE_CHECKING:
    from tightfit.capture.captured import Captured


def load_step(
    target: str, options: StepOptions, *, progress: Progress, exactness: Exactness | None = None
) -> Graph:
    """Return the graph of a graph file, or of a model captured on fake tensors.

    `options`: of a model; of a file only the costs count. `exactness`: of a model: the least exact
    class of alternatives. Raises `BadInput` if the target names neither, or for options that do not
    belong to it.
    """
    if is_model(target):
        exact = exactness or "bitwise"
        return load_model(target, options, progress=progress, exactness=exact).graph
    if options.given:
        raise BadInput(
            f"--{', --'.join(options.given)} can be set for models only; {target} is a file"
        )
    if exactness is not None:
        raise BadInput(f"--exactness can be set for models only; {target} is a file")
    return load_target(target, options.costs)


def load_model(
    target: str,
    options: StepOptions,
    *,
    progress: Progress,
    alternatives: str = "all",
    exactness: Exactness = "bitwise",
) -> Captured:
    """Return the captured step of a model; parameters are those of `load_step`.

    `alternatives` and `exactness` say which alternatives of operators plans may use.
    """
    from tightfit.studies.dry_step import AllowedAlternatives, captured_step

    return captured_step(
        target,
        progress=progress,
        alternatives=AllowedAlternatives(exactness, alternatives),
        **options.step_keywords(),
    )


def load_target(target: str, costs: str | None = None) -> Graph:
    """Return the graph that a command's first argument names: a ``.json`` or ``.json.gz`` file.

    `costs`: modelled costs instead of those in the file; a GPU's also round sizes as its allocator
    does. Raises `BadInput` if it names no graph file, or one that cannot be read, or for unknown
    costs.
    """
    if not target.endswith((".json", ".json.gz")):
        raise BadInput(
            f"{target!r} is no graph file: its name must end in .json or .json.gz (a model is "
            "zoo:NAME, package.module:factory or path/to/file.py:factory)"
        )
    graph = load_graph(target)
    return graph if costs is None else with_costs(graph, costs)


def budgets_named(graph: Graph, names: str, gradients: Gradients) -> list[tuple[int, float | None]]:
    """Return budgets that are written as sizes or as shares of the activation peak, by commas.

    Returns (bytes, share) for each: the share is None where a size was given. Raises `BadInput` for
    one that is neither.
    """
    found: list[tuple[int, float | None]] = []
    for name in names.split(","):
        try:
            ratio = float(name)
        except ValueError:
            found.append((parse_bytes(name), None))
        else:
            found.append((budget_of_ratio(graph, ratio, gradients=gradients), ratio))
    return found


def chosen_budget(
    graph: Graph, budget: str | None, budget_ratio: float | None, gradients: Gradients
) -> int:
    """Return the budget in bytes from the two options, of which exactly one is given.

    Raises `BadInput` if both or none are given, or one cannot be read.
    """
    if (budget is None) == (budget_ratio is None):
        raise BadInput(
            "give one budget: --budget 8GiB for all that the step may hold, or --budget-ratio 0.5 "
            "for half of its present bytes beyond its constants"
        )
    if budget is not None:
        return parse_bytes(budget)
    assert budget_ratio is not None
    return budget_of_ratio(graph, budget_ratio, gradients=gradients)
