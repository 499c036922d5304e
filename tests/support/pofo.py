"""The least time of a chain in the plans of POFO (Beaumont et al., NeurIPS 2021), and some more.

Its dynamic program combines offloading and recomputation on chains: an activation is stored right
after it was made or never; loads come back in the reverse order; recomputation happens in the
backward phase, from the nearest activation that is there. All such plans are searched here, with
any activation kept or dropped whenever room is wanted, so nothing of its class is quicker.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from support.chains import Layer
from support.links import LinkState
from support.shortest import shortest
from tightfit.plan import Far


def least_time_of_chain_s(layers: Sequence[Layer], budget_bytes: int, far: Far) -> float:
    """Return the least time of a step of `support.chains.graph_of_layers`; ``inf`` if none fits."""
    return _Chain(layers, budget_bytes, far).least_time_s()


@dataclass
class _Chain:
    layers: Sequence[Layer]
    budget: int
    far: Far

    def least_time_s(self) -> float:
        def ending(state: LinkState) -> float | None:
            return 0.0 if state.done == 2 * len(self.layers) else None

        return shortest(LinkState(), self.moves, ending)

    def layer(self, done: int) -> int:
        """The layer whose backward comes next."""
        return 2 * len(self.layers) - 1 - done

    def gradient_bytes(self, done: int) -> int:
        """Bytes of the gradient alive after so many computations."""
        layer = self.layer(done - 1)
        forward = done <= len(self.layers) or layer == 0
        return 0 if forward else self.layers[layer - 1].gradient_bytes

    def held(self, state: LinkState) -> int:
        return sum(self.layers[i].size_bytes for i in state.alive)

    def moves(self, state: LinkState) -> Iterator[tuple[float, LinkState]]:
        if state.done < len(self.layers):
            yield from self.forward(state)
        else:
            yield from self.backward(state)
            yield from self.again(state)
            yield from self.load(state)
        for value in sorted(state.alive):
            yield state.without(value)

    def forward(self, state: LinkState) -> Iterator[tuple[float, LinkState]]:
        layer = state.done
        size = self.layers[layer].size_bytes
        if (layer and layer - 1 not in state.alive) or self.held(state) + size > self.budget:
            return
        after = state.later(self.layers[layer].forward_s)
        after = after._replace(done=layer + 1, alive=after.alive | {layer})
        yield self.layers[layer].forward_s, after
        yield self.layers[layer].forward_s, after.with_store(layer, size, self.far)

    def backward(self, state: LinkState) -> Iterator[tuple[float, LinkState]]:
        layer = self.layer(state.done)
        needed = {i for i in (layer - 1, layer) if i >= 0}
        taken = self.held(state) + self.gradient_bytes(state.done)
        made = self.layers[layer - 1].gradient_bytes if layer else 0
        if not needed <= state.alive or taken + made > self.budget:
            return
        wait = max((s for v, s in state.coming if v in needed), default=0.0)
        took = wait + self.layers[layer].backward_s
        after = state.later(took)
        yield (
            took,
            after._replace(
                done=state.done + 1,
                alive=frozenset(i for i in after.alive if i < layer),
                stored=frozenset(i for i in after.stored if i < layer),
            ),
        )

    def again(self, state: LinkState) -> Iterator[tuple[float, LinkState]]:
        taken = self.held(state) + self.gradient_bytes(state.done)
        for layer in range(self.layer(state.done) + 1):
            ready = layer == 0 or layer - 1 in state.alive
            fits = taken + self.layers[layer].size_bytes <= self.budget
            if layer in state.alive or not ready or not fits:
                continue
            wait = max((s for v, s in state.coming if v == layer - 1), default=0.0)
            took = wait + self.layers[layer].forward_s
            after = state.later(took)
            yield took, after._replace(alive=after.alive | {layer})

    def load(self, state: LinkState) -> Iterator[tuple[float, LinkState]]:
        away = sorted(state.stored - state.alive)[-1:]
        taken = self.held(state) + self.gradient_bytes(state.done)
        for layer in away:
            size = self.layers[layer].size_bytes
            if taken + size <= self.budget:
                yield 0.0, state.with_load(layer, size, self.far)
