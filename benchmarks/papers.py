"""The papers' planners and ours on the papers' models, next to the papers' numbers.

python benchmarks/papers.py compare --models vgg16 --ratios 0.6,0.7,0.8 --time-limit 120
python benchmarks/papers.py sizes|memory|batch|breakdown|step
python benchmarks/papers.py small --ratios 0.7,0.8,0.9
python benchmarks/papers.py tables

Models come from the zoo at the papers' batch sizes and resolutions, captured on fake tensors and
priced by a roofline (``--costs``). Rows go to ``benchmarks/results/papers-*.jsonl``; one that is
there is not computed again, so a run may be stopped and continued. ``tables`` writes
``docs/papers.md`` and its plots from the rows. Ratios are of the activation peak without
recomputation, fresh gradients included, constants not.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import highspy  # noqa: F401  # loaded before anything is timed
import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.papers_small import SEEDS, small_step
from benchmarks.papers_tables import write_tables
from benchmarks.rows import append_rows, read_rows
from tightfit.capture.captured import Captured
from tightfit.graph.ir import Graph
from tightfit.graph.liveness import budget_of_ratio, eager_peak_bytes
from tightfit.plan.assemble import assemble, keep_everything
from tightfit.plan.plan import Compute, Plan
from tightfit.plan.simulate import simulate
from tightfit.planners.base import Limits, Task
from tightfit.planners.papers.checkmate.program import build_program as build_checkmate
from tightfit.planners.papers.checkmate.variables import frontier_stages
from tightfit.planners.papers.monet.implementations import single_implementations
from tightfit.planners.papers.monet.program import build_program as build_monet
from tightfit.planners.papers.stages.staged import staged
from tightfit.planners.questions.compare import ComparisonRow, compared, planners_named
from tightfit.planners.questions.sweep import Job, sweep
from tightfit.planners.registry import find_planner, is_chain, plan_with
from tightfit.studies.dry_step import captured_step
from tightfit.studies.pytorch_methods import PYTORCH_METHODS, PyTorchMethods

HERE = Path(__file__).parent
RESULTS = HERE / "results"
KEPT = HERE / ".papers-rows"
QUICK = "anytime,greedy,linearised_greedy,ap_greedy,chen_greedy"
MONET_MODELS = "vgg16,unet,mobilenet_v2,resnet50,googlenet"
CHECKMATE_MODELS = "vgg19,unet,mobilenet_v1,resnet50,fcn8,segnet"
BATCH = 16  # examples at which a model is captured to be scaled


class Rows:
    """A file of rows that grows; each is known by its key."""

    def __init__(self, kind: str) -> None:
        self.path = RESULTS / f"papers-{kind}.jsonl"
        self.rows = read_rows(self.path)

    def add(self, key: dict[str, Any], compute: Callable[[], dict[str, Any]]) -> None:
        """Compute a row unless one with this key is there; print and store it."""
        if any(all(row.get(name) == value for name, value in key.items()) for row in self.rows):
            return
        row = {**key, **compute()}
        self.rows.append(row)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        append_rows(self.path, row)
        print({name: value for name, value in row.items() if name != "curves"}, flush=True)


def main() -> None:
    """Run one of the benchmarks."""
    options = parse()
    if options.command == "tables":
        write_tables(RESULTS, HERE.parent / "docs")
        return
    kinds = {
        "compare": (compare, MONET_MODELS),
        "sizes": (sizes, MONET_MODELS),
        "memory": (memory, MONET_MODELS),
        "step": (step, "resnet50"),
        "batch": (batch, CHECKMATE_MODELS),
        "breakdown": (breakdown, CHECKMATE_MODELS),
        "small": (small, SEEDS),
    }
    run, models = kinds[options.command]
    for model in (options.models or models).split(","):
        run(model, options)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = ("compare", "sizes", "memory", "step", "batch", "breakdown", "small", "tables")
    parser.add_argument("command", choices=commands)
    parser.add_argument("--costs", default="p100", help="modelled costs, such as p100 or v100")
    parser.add_argument("--models", help="names of zoo models (seeds for small), by commas")
    parser.add_argument("--ratios", default="0.3,0.4,0.5,0.6,0.7,0.8")
    parser.add_argument("--planners", help="names separated by commas, or all")
    parser.add_argument("--time-limit", type=float, default=120.0, help="seconds per cell")
    parser.add_argument("--memory-gib", type=float, default=16.0, help="of the device, for batch")
    return parser.parse_args()


@lru_cache(maxsize=2)
def step_of(model: str, setting: str, costs: str, batch: int | None = None) -> Captured:
    """The captured step of a zoo model at a paper's setting."""
    name = f"zoo:{model}"
    return captured_step(name, optimizer="none", costs=costs, setting=setting, batch=batch)


def captured(model: str, setting: str, costs: str, batch: int | None = None) -> Graph:
    """The graph of a zoo model at a paper's setting."""
    return step_of(model, setting, costs, batch).graph


def able(graph: Graph, planners: str) -> list[str]:
    """The planners among those named that can plan the graph."""
    chain = is_chain(graph)
    return [
        name for name in planners_named(planners) if chain or not find_planner(name).linear_only
    ]


def compare(model: str, options: argparse.Namespace) -> None:
    """Every planner at every ratio: Checkmate's figure 4, MONeT's figure 3 and table 5."""
    rows = Rows("compare")
    graph = captured(model, "monet", options.costs)
    pytorch = PyTorchMethods(step_of(model, "monet", options.costs))
    limits = Limits(seconds=options.time_limit, workers=1)
    names = options.planners or "all"
    asked = names.split(",")
    ways = [way for way in PYTORCH_METHODS if names == "all" or way in asked]
    planners = ",".join(name for name in asked if name not in ways)
    for ratio in map(float, options.ratios.split(",")):
        task = Task(graph=graph, budget_bytes=budget_of_ratio(graph, ratio))
        key = {"graph": model, "costs": options.costs, "ratio": ratio}
        limit = {"time_limit_s": options.time_limit}
        for planner in able(graph, planners) if planners else ():
            job = Job(task=task, planner=planner, limits=limits)
            rows.add(
                {**key, "planner": planner, **limit},
                lambda job=job: as_row(lambda: sweep([job], KEPT)[0]),
            )
        for way in ways:
            rows.add(
                {**key, "planner": way, **limit},
                lambda way=way, task=task: as_row(lambda: pytorch.row(way, task, limits)),
            )


def small(seed: str, options: argparse.Namespace) -> None:
    """Checkmate's program on a random step of 40 to 60 ops, with nothing borrowed."""
    rows = Rows("small")
    graph = small_step(int(seed), options.costs)
    limits = Limits(seconds=options.time_limit, workers=1)
    for ratio in map(float, options.ratios.split(",")):
        task = Task(graph=graph, budget_bytes=budget_of_ratio(graph, ratio))
        rows.add(
            {"graph": seed, "ops": len(graph.ops), "costs": options.costs, "ratio": ratio}
            | {"planner": "checkmate", "time_limit_s": options.time_limit},
            lambda task=task: as_row(lambda: compared(task, "checkmate", limits)),
        )


def processor_s() -> float:
    """Processor time of this process and of the solvers it has waited for."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def as_row(run: Callable[[], ComparisonRow]) -> dict[str, Any]:
    """One cell of the comparison; overheads in percent."""
    before = processor_s()
    row = run()
    return {
        "budget_bytes": row.budget_bytes,
        "status": row.status,
        "overhead_percent": percent(row.overhead),
        "bound_percent": percent(row.bound),
        "peak_bytes": row.peak_bytes,
        "seconds": round(row.seconds, 2),
        "processor_s": round(processor_s() - before, 2),
        "load": round(os.getloadavg()[0], 1),
        "bound_source": row.bound_source,
        "note": row.note,
    }


def percent(fraction: float | None) -> float | None:
    """A fraction in percent with four decimals."""
    return None if fraction is None else round(100 * fraction, 4)


def sizes(model: str, options: argparse.Namespace) -> None:
    """Variables and constraints of the exact programs: MONeT's table 7."""
    rows = Rows("sizes")
    graph = captured(model, "monet", options.costs)
    problem = staged(Task(graph=graph, budget_bytes=budget_of_ratio(graph, 0.7)))
    programs = {
        "checkmate": lambda: build_checkmate(problem, frontier_stages(problem)).program,
        "monet": lambda: build_monet(problem, single_implementations(problem)).program,
    }
    for planner, build in programs.items():

        def size(build: Callable[[], Any] = build) -> dict[str, Any]:
            program = build()
            return {
                "forward_ops": sum(node.is_forward for node in problem.nodes),
                "ops": len(problem.nodes),
                "variables": program.columns,
                "constraints": program.rows,
            }

        rows.add({"graph": model, "planner": planner}, size)


def memory(model: str, options: argparse.Namespace) -> None:
    """The least memory at an overhead of at most 10 %: MONeT's table 1."""
    rows = Rows("memory")
    limits = Limits(seconds=min(options.time_limit, 5.0))
    graph = captured(model, "monet", options.costs)
    for planner in able(graph, options.planners or QUICK):
        key = {"graph": model, "costs": options.costs, "planner": planner}
        rows.add(
            {**key, "time_limit_s": limits.seconds},
            lambda planner=planner: least_memory(graph, planner, limits),
        )


def least_memory(graph: Graph, planner: str, limits: Limits) -> dict[str, Any]:
    """Bisect all memory, constants included, to 1/200 of eager's."""
    eager = eager_peak_bytes(graph)
    low, high = 0, 200
    found = 0.0
    while high - low > 1:
        middle = (low + high) // 2
        row = compared(Task(graph=graph, budget_bytes=eager * middle // 200), planner, limits)
        if row.overhead is not None and row.overhead <= 0.1:
            high, found = middle, row.overhead
        else:
            low = middle
    return {
        "ratio": high / 200,
        "memory_bytes": eager * high // 200,
        "eager_bytes": eager,
        "overhead_percent": percent(found),
    }


def batch(model: str, options: argparse.Namespace) -> None:
    """The largest batch at one extra forward pass: Checkmate's figure 6, equations 7 and 8.

    Costs are floating-point operations, as in the paper; bytes of what depends on the batch
    scale with it, those of parameters and their gradients do not.
    """
    rows = Rows("batch")
    limits = Limits(seconds=min(options.time_limit, 5.0))
    graph = captured(model, "checkmate", "flops", BATCH)
    for planner in able(graph, options.planners or QUICK):
        key = {"graph": model, "planner": planner, "memory_gib": options.memory_gib}
        rows.add(
            {**key, "time_limit_s": limits.seconds},
            lambda planner=planner: largest_batch(
                graph, planner, int(options.memory_gib * 2**30), limits
            ),
        )


def largest_batch(graph: Graph, planner: str, room: int, limits: Limits) -> dict[str, Any]:
    """Bisect the batch for a plan that costs at most one more forward pass."""
    everything = {step.op: step for step in keep_everything(graph)}
    costs = {
        op: graph.ops[op].alternatives[step.alternative].variants[step.variant].cost_s
        for op, step in everything.items()
    }
    phases = [segment.phase for segment in graph.segments]
    forward = sum(c for op, c in costs.items() if phases[graph.ops[op].segment] == "forward")
    allowed = forward / sum(costs.values())

    overheads: dict[int, float] = {}

    def fits(examples: int, planner: str) -> bool:
        task = Task(graph=scaled(graph, examples), budget_bytes=room)
        row = compared(task, planner, limits)
        if row.overhead is None or row.overhead > allowed:
            return False
        overheads[examples] = row.overhead
        return True

    eager = bisected(lambda examples: eager_peak_bytes(scaled(graph, examples)) <= room)
    largest = bisected(lambda examples: fits(examples, planner))
    return {
        "batch": largest,
        "eager_batch": eager,
        "overhead_percent": percent(overheads.get(largest)),
        "allowed_percent": percent(allowed),
    }


def bisected(fits: Callable[[int], bool]) -> int:
    """The largest number for which `fits` holds, by doubling and halving, to one percent."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def scaled(graph: Graph, examples: int) -> Graph:
    """The graph at another batch: activations and inputs scale, parameters and gradients do not."""
    values = tuple(
        value
        if value.role in ("parameter", "buffer", "gradient", "state")
        or value.fate in ("handed_over", "written_back")
        else msgspec.structs.replace(value, size_bytes=times(value.size_bytes, examples))
        for value in graph.values
    )
    constants = dict(graph.constants_bytes)
    if "inputs" in constants:
        constants["inputs"] = times(constants["inputs"], examples)
    device = msgspec.structs.replace(graph.device, granularity_bytes=1)
    return msgspec.structs.replace(graph, values=values, constants_bytes=constants, device=device)


def times(size_bytes: int, examples: int) -> int:
    """Bytes at a batch, from those at the captured one."""
    return -(-size_bytes * examples // BATCH)


def breakdown(model: str, options: argparse.Namespace) -> None:
    """What memory is for: Checkmate's figure 1."""
    graph = captured(model, "checkmate", options.costs, BATCH)

    def parts() -> dict[str, Any]:
        gradients = sum(v.size_bytes for v in graph.values if v.fate == "handed_over")
        plan = assemble(graph, keep_everything(graph), budget_bytes=2**60, gradients="accumulated")
        features = simulate(graph, plan).peak_bytes - graph.constant_bytes
        return {
            "parameter_bytes": graph.constants_bytes.get("parameters", 0),
            "gradient_bytes": gradients,
            "input_bytes": graph.constants_bytes.get("inputs", 0),
            "feature_bytes": features,
        }

    Rows("breakdown").add({"graph": model, "batch": BATCH}, parts)


def step(model: str, options: argparse.Namespace) -> None:
    """Memory and extra time along the step: MONeT's figure 5, at half the activation peak."""
    graph = captured(model, "monet", options.costs)
    everything = assemble(graph, keep_everything(graph), budget_bytes=2**60)

    def curves() -> dict[str, Any]:
        found: dict[str, Any] = {"eager": curve(graph, everything)}
        limits = Limits(seconds=min(options.time_limit, 30.0))
        task = Task(graph=graph, budget_bytes=budget_of_ratio(graph, 0.5))
        for planner in able(graph, options.planners or "anytime,ap_greedy"):
            outcome = plan_with(planner, task, limits)
            if outcome.plan is not None:
                found[planner] = curve(graph, outcome.plan)
        return {"curves": found}

    Rows("step").add({"graph": model, "costs": options.costs, "ratio": 0.5}, curves)


def curve(graph: Graph, plan: Plan) -> list[tuple[int, float]]:
    """GiB alive and seconds spent extra when each op is computed for the first time."""
    result = simulate(graph, plan)
    seen: set[int] = set()
    extra_s = 0.0
    points: list[tuple[int, float]] = []
    for instruction, during in zip(plan.instructions, result.during_bytes, strict=True):
        if not isinstance(instruction, Compute):
            continue
        if instruction.op in seen:
            way = graph.ops[instruction.op].alternatives[instruction.alternative]
            extra_s += way.variants[instruction.variant].cost_s
            continue
        seen.add(instruction.op)
        points.append((during, round(100 * extra_s / result.baseline_cost_s, 3)))
    return points


if __name__ == "__main__":
    main()
