"""Whole steps with and without alternatives of operators: bytes, extra compute, bits.

python benchmarks/whole_steps.py --time-limit 10

Costs and workspaces are measured on this CPU. Four questions of each model:

- ``least``: the fewest bytes with nothing recomputed, between forward and backward and at the peak
- ``curve``: planned extra compute at shares of plain PyTorch's activation peak
- ``steps``: three optimizer steps compared with plain PyTorch's, peaks and bits as measured
- ``noise``: how far those go apart in plain PyTorch if weights differ in their last bits

Rows go to ``benchmarks/results/whole_steps.jsonl``; one that is there is not computed again.
``benchmarks/alternatives_tables.py`` makes ``docs/alternatives-measured.md`` of them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgspec
import torch
from torch import nn

from benchmarks.real_models import DECODER, untrained
from benchmarks.rows import append_rows, read_rows
from tightfit.errors import InfeasibleBudget
from tightfit.graph.ir import Exactness, Graph
from tightfit.graph.liveness import budget_of_ratio, eager_peak_bytes
from tightfit.plan.assemble import assemble, keep_everything
from tightfit.plan.simulate import simulate
from tightfit.planners.anytime.planner import run_anytime
from tightfit.planners.base import Limits, Task
from tightfit.progress import SILENT
from tightfit.studies.bits import largest_difference
from tightfit.studies.comparison import Comparison
from tightfit.studies.dry_step import AllowedAlternatives, graph_of
from tightfit.studies.model import load_example
from tightfit.studies.training import train
from tightfit.studies.workload import Workload, with_loss_inside
from tightfit.zoo import Example, make
from tightfit.zoo.example import classification
from tightfit.zoo.gpt2 import GPT2
from tightfit.zoo.vgg import VGG, VGG16_STAGES

__all__ = ["MODELS", "ROWS", "least_bytes", "nothing_recomputed"]

ROWS = Path(__file__).parent / "results" / "whole_steps.jsonl"
SHARES = (0.8, 0.6, 0.5, 0.4, 0.3)
AT_STEPS = 0.5
RESOLUTION = 0.005
LAST_BITS = 1e-7
WAYS: tuple[tuple[str, Exactness], ...] = (
    ("none", "bitwise"),
    ("all", "bitwise"),
    ("all", "rounding"),
)


def vgg16_bn(batch: int = 4, size: int = 224) -> Example:
    """VGG-16 with a BatchNorm behind every convolution."""
    model = VGG(VGG16_STAGES, dropout=0.5)
    layers = []
    for layer in model.features:
        layers.append(layer)
        if isinstance(layer, nn.Conv2d):
            layers.append(nn.BatchNorm2d(layer.out_channels))
    model.features = nn.Sequential(*layers)
    return classification(model, batch, (size, size))


def efficientnet_b0(batch: int = 8, size: int = 224) -> Example:
    """EfficientNet-B0 of `transformers`, with PyTorch's own first weights.

    With those of `transformers`, whose norms begin near zero, nearly all gradients are zero.
    """
    model = untrained(
        "EfficientNetForImageClassification",
        image_size=size,
        width_coefficient=1.0,
        depth_coefficient=1.0,
        hidden_dim=1280,
        dropout_rate=0.2,
        num_labels=1000,
    )
    for layer in model.train().modules():
        if isinstance(layer, nn.Conv2d | nn.BatchNorm2d | nn.Linear):
            layer.reset_parameters()
    inputs = {
        "pixel_values": torch.randn(batch, 3, size, size),
        "labels": torch.randint(0, 1000, (batch,)),
    }
    return Example(model, None, inputs, None)


class LinearLoss(nn.Module):
    """A last linear layer, 256 to 32000 words, and its cross-entropy: [N, 256] -> scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.randn(2048, 256))
        self.head = nn.Linear(256, 32000, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return the loss of 2048 tokens."""
        return nn.functional.cross_entropy(self.head(self.tokens), words)


def linear_cross_entropy() -> Example:
    """2048 tokens, 256 numbers each, 32000 words."""
    return Example(LinearLoss(), None, (torch.randint(0, 32000, (2048,)),), None)


def small_gpt2() -> Example:
    """GPT-2 with 4 layers of 256, 8000 words, no dropout."""
    model = GPT2(layers=4, width=256, heads=8, vocabulary=8000, context=256, dropout=0.0)
    words, targets = (torch.randint(0, 8000, (8, 256)) for _ in range(2))
    return Example(model.train(), None, (words, targets), None)


def llama() -> Example:
    """Llama-shaped: 4 layers of 256, 8000 words."""
    sizes = {**DECODER, "vocab_size": 8000, "num_hidden_layers": 4}
    model = untrained("LlamaForCausalLM", **sizes)
    words = torch.randint(0, 8000, (8, 256))
    return Example(model.train(), None, {"input_ids": words, "labels": words.clone()}, None)


MODELS: dict[str, Callable[[], Example]] = {
    "mobilenet_v2": lambda: make("mobilenet_v2", batch=8, size=224),
    "vgg16_bn": vgg16_bn,
    "unet": lambda: make("unet", batch=8, size=128),
    "efficientnet_b0": efficientnet_b0,
    "gpt2": lambda: make("gpt2"),
    "llama": llama,
    "linear_cross_entropy": linear_cross_entropy,
}
"""What is planned."""

SMALLER: dict[str, Callable[[], Example]] = {
    "mobilenet_v2": lambda: make("mobilenet_v2", batch=16, size=96),
    "vgg16_bn": lambda: vgg16_bn(size=96),
    "unet": lambda: make("unet", batch=4, size=128),
    "efficientnet_b0": lambda: efficientnet_b0(size=96),
    "gpt2": small_gpt2,
    "llama": llama,
    "linear_cross_entropy": linear_cross_entropy,
}
"""What is trained: the same at sizes at which a step takes a second."""


def main() -> None:
    """Run every cell whose row is missing."""
    options = parse()
    torch.set_num_threads(1)
    rows = read_rows(ROWS)
    done = {(row["model"], row["question"], row["ways"], row["exactness"]) for row in rows}
    for model in options.models.split(","):
        for question in options.questions.split(","):
            for ways, exactness in WAYS:
                if (model, question, ways, exactness) in done:
                    continue
                for found in QUESTIONS[question](model, ways, exactness, options):
                    row = {
                        "model": model,
                        "question": question,
                        "ways": ways,
                        "exactness": exactness,
                        **found,
                        "load": round(os.getloadavg()[0], 1),
                    }
                    print(row, flush=True)
                    append_rows(ROWS, row)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--questions", default=",".join(QUESTIONS))
    parser.add_argument("--rounds", type=int, default=5, help="timed steps, interleaved")
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds per plan")
    return parser.parse_args()


@lru_cache(maxsize=1)
def captured(model: str, ways: str, exactness: Exactness) -> Graph:
    """The graph of a model's step with some alternatives, priced on this machine."""
    torch.manual_seed(0)
    return graph_of(
        MODELS[model],
        optimizer="none",
        costs="measured",
        alternatives=AllowedAlternatives(exactness, ways),
    )


def nothing_recomputed(graph: Graph) -> Graph:
    """A graph of which no op may be computed twice."""
    ops = tuple(msgspec.structs.replace(op, pinned="a question's own") for op in graph.ops)
    return msgspec.structs.replace(graph, ops=ops)


def least_bytes(graph: Graph, limits: Limits) -> dict[str, int]:
    """The fewest bytes above the constants with nothing recomputed: crossing, and at the peak."""
    fixed = nothing_recomputed(graph)
    least = least_peak_bytes(fixed, limits)
    segments = tuple(  # as much outside as lets the peak lie between forward and backward
        msgspec.structs.replace(s, outside_bytes=least if s.phase == "backward" else 0)
        for s in fixed.segments
    )
    crossing = least_peak_bytes(msgspec.structs.replace(fixed, segments=segments), limits)
    return {"crossing_bytes": crossing - least, "peak_bytes": least}


def least_peak_bytes(graph: Graph, limits: Limits) -> int:
    """The lowest peak above the constants for which a plan is found, to within `RESOLUTION`."""
    constants = graph.constant_bytes
    found = most = eager_peak_bytes(graph) - constants
    missed = 0
    while found - missed > RESOLUTION * most:
        middle = (found + missed) // 2
        task = Task(graph=graph, budget_bytes=constants + middle)
        outcome = run_anytime(task, limits, SILENT).outcome
        if outcome.plan is None:
            missed = middle
        else:
            found = outcome.peak_bytes - constants
    return found


def of_least(
    model: str, ways: str, exactness: Exactness, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Bytes with nothing recomputed, next to those of PyTorch's own order and operators."""
    graph = captured(model, ways, exactness)
    whole = eager_peak_bytes(graph)
    plain = simulate(graph, assemble(graph, keep_everything(graph), budget_bytes=whole))
    yield {
        "n": len(graph.ops),
        "plain_crossing_bytes": plain.crossing_bytes - graph.constant_bytes,
        "plain_peak_bytes": whole - graph.constant_bytes,
        **least_bytes(graph, Limits(seconds=options.time_limit / 2, gap=1.0)),
    }


def of_curve(
    model: str, ways: str, exactness: Exactness, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Planned extra compute at each share."""
    graph = captured(model, ways, exactness)
    cells = []
    for share in SHARES:
        task = Task(graph=graph, budget_bytes=budget_of_ratio(graph, share))
        outcome = run_anytime(task, Limits(seconds=options.time_limit), SILENT).outcome
        found = outcome.plan is not None
        cells.append(
            {
                "share": share,
                "status": outcome.status,
                "overhead": outcome.overhead if found else None,
                "bound": None if outcome.status == "infeasible" else outcome.bound,
                "seconds": round(outcome.seconds, 2),
            }
        )
    activations = eager_peak_bytes(graph) - graph.constant_bytes
    gradients = sum(value.size_bytes for value in graph.values if value.fate == "handed_over")
    yield {"cells": cells, "gradients_share": gradients / activations}


def of_steps(
    model: str, ways: str, exactness: Exactness, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Three optimizer steps at half of plain PyTorch's activation peak."""
    if ways == "none":
        return
    torch.manual_seed(0)
    comparison = Comparison(
        with_loss_inside(load_example(SMALLER[model])),
        steps=3,
        name=model,
        exactness=exactness,
        limits=Limits(seconds=options.time_limit),
    )
    try:
        proof = comparison.at(comparison.budget_of(AT_STEPS), rounds=options.rounds)
    except InfeasibleBudget as error:
        yield {"share": AT_STEPS, "message": str(error)}
        return
    yield {
        "share": AT_STEPS,
        "holds": proof.holds,
        "bitwise": proof.bitwise,
        "max_relative_difference": proof.max_relative_difference,
        "activation_ratio": proof.activation_ratio,
        "overhead": proof.overhead,
        "bound": proof.bound,
        "time_ratio": proof.time_ratio,
        "time_ratios": proof.time_ratios,
    }


def of_noise(
    model: str, ways: str, exactness: Exactness, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """How far three steps of plain PyTorch go apart if its weights differ in their last bits."""
    if exactness == "bitwise":
        return
    torch.manual_seed(0)
    workload = Workload(load_example(SMALLER[model]), 0)
    train(workload, 3)
    expected = {key: tensor.clone() for key, tensor in workload.tensors().items()}
    for tensor in workload.initial.values():
        if tensor.is_floating_point():
            tensor.mul_(1 + LAST_BITS * torch.randn(tensor.shape))
    train(workload, 3)
    yield {"max_relative_difference": largest_difference(expected, workload.tensors())}


QUESTIONS = {"noise": of_noise, "least": of_least, "curve": of_curve, "steps": of_steps}


if __name__ == "__main__":
    main()
