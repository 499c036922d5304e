"""Plans that also move values to far memory, and those that do not, at the same budgets.

python benchmarks/offload.py --time-limit 20
python benchmarks/offload.py --table

Graphs are captured on fake tensors. ``h200``: roofline costs of an H100, all scaled by one factor
so that a plain step takes as long as was measured on an H200 (../shared/studies/gpu.md; the
optimizer's step, a few per cent, is in that time). ``p100``: roofline costs of a P100. Links have
the same speed in both directions and far memory has room for everything. Shares are of what a
plain step holds above what stays between steps. Rows go to ``benchmarks/results/offload.jsonl``;
one that is there is not computed again. Nothing runs: times are those of the simulator.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.real_models import untrained
from benchmarks.rows import append_rows, read_rows
from tightfit.graph.ir import Graph
from tightfit.graph.liveness import budget_of_ratio, eager_peak_bytes
from tightfit.plan.plan import Far
from tightfit.plan.simulate import baseline_cost_s, simulate
from tightfit.planners.base import Limits, Task
from tightfit.planners.registry import DEFAULT, plan_with
from tightfit.studies.dry_step import graph_of
from tightfit.zoo import make
from tightfit.zoo.example import Example

ROWS = Path(__file__).parent / "results" / "offload.jsonl"
ROOM_BYTES = 1 << 42
LINKS_GB_PER_S = (0, 16, 50, 400)
"""0: no far memory."""


class InBfloat16(nn.Module):
    """A language model whose operators run in bfloat16 where autocast has them do so."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.model(input_ids=input_ids, labels=labels, use_cache=False).loss


def language(name: str, batch: int, sequence: int, **config: Any) -> Example:
    """A model of transformers with its loss inside."""
    model = InBfloat16(untrained(name, **config)).train()
    tokens = torch.randint(0, 1000, (batch, sequence))
    return Example(model, None, (tokens, tokens.clone()), None)


def gpt2_medium() -> Example:
    """GPT-2 medium, 8 x 1024."""
    sizes = {"n_layer": 24, "n_embd": 1024, "n_head": 16, "n_positions": 1024}
    return language("GPT2LMHeadModel", 8, 1024, **sizes, **dict.fromkeys(DROPOUTS, 0.0))


def llama() -> Example:
    """Llama 1.1B, 4 x 2048."""
    sizes = {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
    }
    return language("LlamaForCausalLM", 4, 2048, **sizes)


DROPOUTS = ("attn_pdrop", "embd_pdrop", "resid_pdrop")
MODELS: dict[str, tuple[Callable[[], Example], str, float, tuple[str, ...]]] = {
    "resnet50": (lambda: make("resnet50", 128, size=224), "momentum", 0.0603, ("h200", "p100")),
    "unet": (lambda: make("unet", setting="monet"), "momentum", 0.1208, ("h200", "p100")),
    "gpt2_medium": (gpt2_medium, "adamw", 0.1170, ("h200",)),
    "llama_1b": (llama, "adamw", 0.1361, ("h200",)),
}
"""How it is made, its optimizer, seconds of a plain step on an H200, and costs to plan with."""

RATIOS = (0.6, 0.4, 0.26)


@lru_cache(maxsize=1)
def captured(model: str) -> Graph:
    """The step of a model with costs of an H100."""
    make_it, optimizer, _, _ = MODELS[model]
    return graph_of(make_it, optimizer=optimizer, costs="h100")


def priced(model: str, costs: str) -> Graph:
    """The step of a model with the costs asked for."""
    graph = captured(model)
    if costs == "p100":
        from tightfit.costs import with_costs

        return with_costs(graph, "p100")
    return scaled(graph, MODELS[model][2] / baseline_cost_s(graph))


def scaled(graph: Graph, factor: float) -> Graph:
    """The graph with all costs times a factor."""

    def way(alternative: Any) -> Any:
        variants = tuple(
            msgspec.structs.replace(v, cost_s=factor * v.cost_s) for v in alternative.variants
        )
        return msgspec.structs.replace(alternative, variants=variants)

    ops = tuple(
        msgspec.structs.replace(op, alternatives=tuple(map(way, op.alternatives)))
        for op in graph.ops
    )
    return msgspec.structs.replace(graph, ops=ops)


def main() -> None:
    """Run every cell whose row is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--time-limit", type=float, default=20.0, help="seconds per plan")
    parser.add_argument("--table", action="store_true", help="only print the rows as a table")
    options = parser.parse_args()
    rows = read_rows(ROWS)
    done = {(row["graph"], row["costs"], row["ratio"], row["link_gb_per_s"]) for row in rows}
    if options.table:
        print(table(rows))
        return
    for cell in cells(options.models.split(",")):
        if cell not in done:
            row = measured(*cell, options.time_limit)
            print(row, flush=True)
            append_rows(ROWS, row)


def table(rows: list[dict[str, Any]]) -> str:
    """Overhead (bound; stalls) in percent of a plain step, by share and link, in Markdown."""
    links = [f"{link} GB/s" if link else "without" for link in LINKS_GB_PER_S]
    lines = ["| step | costs | share | " + " | ".join(links) + " |", "|---" * 7 + "|"]
    found = {(r["graph"], r["costs"], r["ratio"], r["link_gb_per_s"]): r for r in rows}
    for model, costs, ratio, _ in dict.fromkeys((*cell[:3], 0) for cell in cells(list(MODELS))):
        own = [found.get((model, costs, ratio, link)) for link in LINKS_GB_PER_S]
        if any(own):
            texts = [_entry(row) for row in own]
            lines.append(f"| {model} | {costs} | {ratio} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def _entry(row: dict[str, Any] | None) -> str:
    if row is None:
        return "not run"
    if "overhead" not in row:
        return str(row["status"])
    percent = [100.0 * row[key] for key in ("overhead", "bound", "stall")]
    return "{:.2f} ({:.2f}; {:.2f})".format(*percent)


def cells(models: list[str]) -> Iterator[tuple[str, str, float, int]]:
    """Each model, costs, share and link."""
    for model in models:
        for costs in MODELS[model][3]:
            for ratio in RATIOS:
                for link in LINKS_GB_PER_S:
                    yield model, costs, ratio, link


def measured(model: str, costs: str, ratio: float, link: int, seconds: float) -> dict[str, Any]:
    """The plan of a cell, as a row."""
    graph = priced(model, costs)
    speed = link * 1e9
    far = (
        Far(capacity_bytes=ROOM_BYTES, store_bytes_per_s=speed, load_bytes_per_s=speed)
        if link
        else None
    )
    budget = budget_of_ratio(graph, ratio, gradients="fresh")
    task = Task(graph=graph, budget_bytes=budget, far=far)
    outcome = plan_with(DEFAULT, task, Limits(seconds=seconds))
    row = {
        "graph": model,
        "costs": costs,
        "ratio": ratio,
        "link_gb_per_s": link,
        "n": len(graph.ops),
        "plain_bytes": eager_peak_bytes(graph),
        "constant_bytes": graph.constant_bytes,
        "plain_s": baseline_cost_s(graph),
        "budget_bytes": budget,
        "status": outcome.status,
        "bound": outcome.bound if outcome.status != "infeasible" else None,
        "bound_source": outcome.bound_source,
        "seconds": round(outcome.seconds, 2),
        "load": round(os.getloadavg()[0], 1),
    }
    if outcome.plan is None:
        return row
    result = simulate(graph, outcome.plan)
    return row | {
        "overhead": result.overhead,
        "peak_bytes": result.peak_bytes,
        "stall": result.stall_s / result.baseline_cost_s,
        "recomputed": sum(times for _, times in result.recomputed),
        "moved_bytes": result.moved_bytes,
        "far_bytes": result.far_peak_bytes,
    }


if __name__ == "__main__":
    main()
