"""Every operator that PyTorch tests itself with, in a fitted module: the bits of plain PyTorch.

    pip install expecttest
    nice python benchmarks/operators.py

For each operator of `torch.testing._internal.common_methods_invocations.op_db` that has gradients,
up to three of its sample inputs are taken: as they are, with gaps between their elements, and
turned (the last two dimensions lie the other way round), which also goes to its form that writes in
place. A module computes a loss from what it gives; loss and gradients are compared with those of
plain PyTorch. One line for each case that is not equal, and a summary, go to
``benchmarks/results/operators.jsonl``.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).parents[1]))

import tightfit
from benchmarks.training import circumstances
from tightfit.errors import TightfitError

RESULTS = Path(__file__).parent / "results" / "operators.jsonl"
MOST_SECONDS = 12  # for one operator
LAYOUTS = ("as they are", "with gaps", "turned", "turned, in place")


class Applied(nn.Module):
    """Applies an operator to its parameters and buffers; returns a loss.

    Parameters
    ----------
    operator : callable
        Any.
    given : tuple
        What it is called with: the first argument, the others, keywords.
    is_turned : bool
        Whether parameters lie with their last two dimensions the other way round.
    """

    def __init__(self, operator: Callable[..., Any], given: Any, *, is_turned: bool) -> None:
        super().__init__()
        self.operator = operator
        self.is_turned = is_turned
        self.leaves, self.spec = pytree.tree_flatten(given)
        for index, leaf in enumerate(self.leaves):
            if not isinstance(leaf, Tensor):
                continue
            self.leaves[index] = None
            if leaf.requires_grad:
                self.register_parameter(f"leaf{index}", nn.Parameter(self._lying(leaf.detach())))
            else:
                self.register_buffer(f"leaf{index}", leaf.detach().clone())

    def _lying(self, tensor: Tensor) -> Tensor:
        if self.is_turned and tensor.dim() > 1:
            return tensor.transpose(-1, -2).contiguous()
        strides = tensor.contiguous().stride() if 0 in tensor.stride() else tensor.stride()
        anew = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype)
        return anew.copy_(tensor)

    def _leaf(self, index: int) -> Any:
        leaf = getattr(self, f"leaf{index}", self.leaves[index])
        if not isinstance(leaf, nn.Parameter):
            return leaf
        return (leaf.transpose(-1, -2) if self.is_turned and leaf.dim() > 1 else leaf) * 1

    def forward(self) -> Any:
        leaves = [self._leaf(index) for index in range(len(self.leaves))]
        first, others, named = pytree.tree_unflatten(leaves, self.spec)
        loss = 0
        for result in pytree.tree_leaves(self.operator(first, *others, **named)):
            if isinstance(result, Tensor) and (result.is_floating_point() or result.is_complex()):
                real = torch.view_as_real(result) if result.is_complex() else result
                weights = torch.arange(1, real.numel() + 1, dtype=real.dtype)
                loss = loss + (real.sin() * weights.view(real.shape)).sum()
        return loss


def applied(operator: Any, layout: str, sample: Any) -> Applied | None:
    """Return the module of a sample in one of `LAYOUTS`; None where there is none."""
    function = operator.inplace_variant if layout.endswith("in place") else operator.op
    if function is None:
        return None
    if layout == "with gaps":
        sample = sample.noncontiguous()
    given = (sample.input, sample.args, sample.kwargs)
    return Applied(function, given, is_turned=layout.startswith("turned"))


def outcome(module: Applied) -> str:
    """Return how a fitted module compares with plain PyTorch."""
    try:
        plain, again = (_trained(copy.deepcopy(module)) for _ in range(2))
    except (RuntimeError, TypeError, ValueError, IndexError):
        return "not in plain PyTorch"
    if not plain or not _equal(plain, again):
        return "no gradient" if not plain else "plain PyTorch differs from itself"
    try:
        fitted = tightfit.fit(copy.deepcopy(module), "1GiB", costs="unit", cache=False)
        return "equal" if _equal(plain, _trained(fitted)) else "unequal"
    except TightfitError as error:
        return f"refused: {error}"[:200]
    except Exception as error:
        return f"error: {type(error).__name__}: {error}"[:200]


def _trained(module: nn.Module) -> list[Tensor]:
    torch.manual_seed(0)
    loss = module()
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        return []
    loss.backward()
    nothing = torch.zeros(())
    return [loss.detach(), *(nothing if p.grad is None else p.grad for p in module.parameters())]


def _equal(one: list[Tensor], other: list[Tensor]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def cases(most_samples: int, *, every: int = 1) -> Iterator[tuple[str, str, str]]:
    """Yield operator, layout and outcome, of one operator out of so many."""
    from torch.testing._internal.common_methods_invocations import op_db

    for operator in op_db[::every]:
        if not operator.supports_autograd:
            continue
        if torch.float32 not in operator.supported_dtypes("cpu"):
            continue
        name = f"{operator.name} {operator.variant_test_name}".strip()
        samples = list(operator.sample_inputs("cpu", torch.float32, requires_grad=True))
        if not samples:
            continue
        ended = time.monotonic() + MOST_SECONDS
        chosen = sorted({0, len(samples) // 2, len(samples) - 1})[-most_samples:]
        for sample in (samples[i] for i in chosen):
            for layout in LAYOUTS:
                if time.monotonic() > ended:
                    break
                try:
                    module = applied(operator, layout, sample)
                except RuntimeError:  # a sparse sample has no layout
                    continue
                if module is not None:
                    yield name, layout, outcome(module)


def main() -> None:
    """Compare all; write what is not equal, and a summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=3, help="of each operator, at most")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    operators: set[str] = set()
    with RESULTS.open("w") as file:
        for name, layout, found in cases(options.samples):
            kind = found.partition(":")[0]
            counts[kind] += 1
            operators.add(name)
            if kind in ("unequal", "error", "refused"):
                file.write(
                    json.dumps({"operator": name, "layout": layout, "outcome": found}) + "\n"
                )
                print(name, layout, found, flush=True)
        summary = {**circumstances(1, rounds=1), "samples": options.samples}
        summary |= {"operators": len(operators), **counts}
        file.write(json.dumps(summary) + "\n")
        print(summary)


if __name__ == "__main__":
    main()
