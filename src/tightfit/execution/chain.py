"""The chain of autograd's nodes of a planned call, and which call has made a tensor or a node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tightfit.torch_private import engine, tools


class Chained:
    """A call whose outputs leave a chain of nodes of autograd's, each of which has it as `run`."""

    runner: Any  # of `execution.runtime`; None: no forward has begun
    aliases: dict[int, Any]

    def take_aliases(self) -> dict[int, Any]:
        """Return the outputs that are made again outside the program, and drop them."""
        raise NotImplementedError

    def forward(self, node: Any) -> tuple[torch.Tensor, ...]:
        """Run the forward program; `node`: the call's first node in autograd's graph."""
        raise NotImplementedError

    def start(self, gradients: Sequence[torch.Tensor | None], node: Any) -> None:
        """Begin the backward program with the gradients of the outputs, which came to a node."""
        raise NotImplementedError

    def next_gradients(self, index: int) -> list[torch.Tensor | None]:
        raise NotImplementedError


def chained(given: list[Any]) -> dict[int, Any]:
    """Make the chain of nodes of a run on its inputs, which it follows; return the raw outputs."""
    *inputs, run = given
    runner = run.runner
    token: Any = torch.empty(0, device=runner.device, requires_grad=True)
    groups = runner.program.groups or ((),)
    for index in range(len(groups) - 1, -1, -1):
        places = groups[index] if index else (*groups[0], *runner.stepped)
        token = engine.applied(_Node, (run, index, token), map(inputs.__getitem__, places))
    raw = token if isinstance(token, tuple) else (token,)
    found = dict(zip(runner.returned.plain, raw, strict=True))
    return found | run.take_aliases() if run.aliases else found


def made_by(tensor: Any) -> tuple[Any, int] | None:
    """Return which call has made a tensor, and as which output of its chain; None: none has."""
    node = tensor.grad_fn if isinstance(tensor, torch.Tensor) else None
    run = _run_of(node)
    return None if run is None or node.index > 0 else (run, tensor.output_nr)


def gradient_edges(node: Any, groups: Sequence[Sequence[int]]) -> dict[int, tuple[Any, int]]:
    """Return where in autograd's graph the gradients of a call go, by their placeholders.

    `node`: the first node of the call's chain. `groups`: the placeholders whose gradients each node
    of the chain hands over.
    """
    found: dict[int, tuple[Any, int]] = {}
    for positions in groups:
        following, *edges = node.next_functions
        found.update(zip(positions, edges, strict=False))  # of others behind them
        node = following[0]
    return found


def goes_on_through(node: Any, run: Chained) -> bool:
    """Whether the backward that runs now goes on behind a call's chain of nodes."""
    while _run_of(node) is run:
        following, *edges = node.next_functions
        if any(before is not None and engine.asks_for_gradient(before) for before, _ in edges):
            return True
        node = following[0]
    return False


def _run_of(node: Any) -> Chained | None:
    """Return the call whose chain a node belongs to; None if it belongs to none."""
    run = getattr(node, "run", None)
    return run if isinstance(run, Chained) else None


class _Node(torch.autograd.Function):
    boxed_grads_call = True

    @staticmethod
    def forward(ctx: Any, run: Chained, index: int, token: torch.Tensor, *owners: Any) -> Any:
        ctx.run = run
        ctx.index = index
        ctx.owners = len(owners)
        ctx.set_materialize_grads(False)
        ctx.token_device = token.device
        if index > 0:
            return torch.empty(0, device=token.device)
        raw = run.forward(ctx)
        assert run.runner is not None
        returned = run.runner.returned
        outputs = returned.hidden(raw)
        if without_history := returned.without_history(outputs):
            ctx.mark_non_differentiable(*without_history)
        return outputs if len(outputs) != 1 else outputs[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        incoming = gradients[0] if gradients and isinstance(gradients[0], list) else list(gradients)
        run: Chained = ctx.run
        if ctx.index == 0:
            run.start(incoming, ctx)
        incoming.clear()
        finished = run.next_gradients(ctx.index)
        result = (*finished, *[None] * (ctx.owners - len(finished)))  # none for stepped parameters
        finished.clear()
        return (None, None, torch.empty(0, device=ctx.token_device), *result)


tools.hide_all_from_dynamo(_Node.backward)  # code that Dynamo follows may call backward
