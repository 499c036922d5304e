"""Differences between the supported releases of PyTorch that a user may notice.

Each entry is looked for by name where it is used; that this table says the same is tested.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

RELEASE: tuple[int, int] = tuple(map(int, torch.__version__.split(".")[:2]))  # type: ignore
"""The release of PyTorch here: major and minor number."""
OLDEST = (2, 11)
"""The oldest that tightfit takes."""


@dataclass(frozen=True)
class Since:
    """Something that PyTorch can do from a release on."""

    release: tuple[int, int]  # the first release
    what: str  # the feature
    before: str  # the behaviour of earlier releases

    @property
    def is_available(self) -> bool:
        """Whether the release here can do it."""
        return self.release <= RELEASE

    @property
    def name(self) -> str:
        """The first release, as one writes it."""
        return "{}.{}".format(*self.release)


LEAVES = Since(
    (2, 12),
    "a module is one op of a plan: those marked by `tightfit.opaque`",
    "it ends a graph: the code before and after it has a plan each, and sums of half precision "
    "that reach into several of them may round differently",
)
DERIVATIVES = Since(
    (2, 12),
    "`torch.autograd.grad` and `requires_grad_()` inside a forward are part of a graph",
    "they end a graph, and with random numbers in the forward the derivative is refused by name",
)
VALUES = Since(
    (2, 13),
    "an inner module in which data decide sizes is one op of a plan",
    "it ends a graph, and runs outside of every plan",
)
COMPILED_ONLINE = Since(
    (2, 13),
    "the core of `tightfit.online` is compiled: its dispatch key is below PyTorch's modes",
    "the core is Python, which costs each operator more",
)
CAUGHT_ERRORS = Since(
    (2, 14),
    "errors of PyTorch that a forward catches are part of a graph",
    "a module that catches one runs as plain PyTorch",
)
TABLE = (LEAVES, DERIVATIVES, VALUES, COMPILED_ONLINE, CAUGHT_ERRORS)
