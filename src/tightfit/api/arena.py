"""The arena around any training loop."""

from __future__ import annotations

from tightfit.arenas.arena import Arena


def arena() -> Arena:
    """Return an arena for a loop of plain PyTorch on the CPU.

    ::

        with tightfit.arena() as arena:
            for x, y in batches:
                loss = loss_fn(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                arena.step()

    A step is recorded and laid out. Later steps get their memory at planned addresses in one
    mapping that is as high as the most that is alive at one time. Requests that differ from the
    plan are served as without the arena, and counted in ``arena.report``. Mark the steps where the
    fewest tensors are alive: right after ``zero_grad``. Where steps differ in size, name the coming
    one: ``arena.step(x.shape)`` at the top of the loop.

    Nothing is recomputed, and every bit stays as it is.
    """
    return Arena()
