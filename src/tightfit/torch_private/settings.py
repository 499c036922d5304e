"""The settings of PyTorch that decide which operators run, and how new tensors are made."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["global_settings"]

_CPU = torch.device("cpu")


def global_settings() -> tuple[Any, ...]:
    """Return what decides, beside modules and inputs, which operators a forward runs.

    The hooks of all modules, what new tensors are like, which kernels may be chosen.
    """
    hooks = torch.nn.modules.module
    return (
        tuple(hooks._global_forward_pre_hooks),
        tuple(hooks._global_forward_hooks),
        tuple(hooks._global_backward_pre_hooks),
        tuple(hooks._global_backward_hooks),
        torch.get_default_dtype(),
        _default_device(),
        torch.are_deterministic_algorithms_enabled(),
        torch._C._get_cudnn_enabled(),
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
    )


def _default_device() -> torch.device:
    """Return where new tensors lie: on the CPU where no mode is around that says otherwise."""
    return torch.get_default_device() if torch._C._len_torch_function_stack() else _CPU
