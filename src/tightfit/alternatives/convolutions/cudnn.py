"""Convolutions by other kernels of cuDNN, or by none: time against workspace (MONeT, section 4).

cuDNN has several algorithms for each convolution, and PyTorch takes the algorithm that a heuristic
names, however large its workspace. Under other settings it takes another: the fastest when all were
tried, an algorithm that gives the same bits each time, or PyTorch's own kernel. The memory of each
is measured where it is priced. The settings are those of `torch.backends.cudnn`, changed around one
call; precision (TF32) stays as set.

Written without a GPU: `tests/gpu` runs it (`make gpu-proof`).
"""

from __future__ import annotations

from typing import Any

import torch

from tightfit.alternatives.base import Extension, Implementation, OpView

CHOICES = {
    "fastest": (True, True, False),
    "deterministic": (True, False, True),
    "native": (False, False, False),
}
"""By name: whether cuDNN runs at all, tries all kernels, takes only those of fixed bits."""


def under_settings(function: Any, settings: tuple[bool, bool, bool], *args: Any) -> Any:
    """Run an operator with cuDNN enabled or not, with trials, with fixed bits.

    `settings`: as in `CHOICES`.
    """
    cudnn = torch.backends.cudnn
    before = cudnn.enabled, cudnn.benchmark, cudnn.deterministic
    try:
        cudnn.enabled, cudnn.benchmark, cudnn.deterministic = settings
        return function(*args)
    finally:
        cudnn.enabled, cudnn.benchmark, cudnn.deterministic = before


def convolution_by_cudnn(view: OpView) -> Extension | None:
    """Offer a convolution, or its gradients, by other kernels, on a GPU with cuDNN.

    Where the user asked for deterministic algorithms, only by those.
    """
    if view.captured.graph.device.kind != "cuda" or not torch.backends.cudnn.is_available():
        return None
    names = ("deterministic",) if torch.are_deterministic_algorithms_enabled() else CHOICES
    implementations = (
        Implementation(
            f"convolution.cudnn_{name}",
            under_settings,
            (view.call.function, CHOICES[name], *view.call.args),
            exactness="rounding",
            compiles=False,
        )
        for name in names
    )
    return Extension(tuple(implementations))
