"""The settings of PyTorch that decide which operators run, and how new tensors are made."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["global_settings", "settings_of_kernels", "within_modes"]

_CPU = torch.device("cpu")


def global_settings() -> tuple[Any, ...]:
    """Return what decides, beside modules and inputs, which operators a forward runs.

    The hooks of all modules, what new tensors are like, which kernels may be chosen.
    """
    return (
        *_hooks_of_all_modules(),
        torch.get_default_dtype(),
        _default_device(),
        torch.are_deterministic_algorithms_enabled(),
        torch._C._get_cudnn_enabled(),
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
    )


def settings_of_kernels() -> tuple[Any, ...]:
    """Return what PyTorch's own code asks before it chooses an operator."""
    return (
        torch._C._get_mkldnn_enabled(),
        torch.get_float32_matmul_precision(),
        torch.backends.mha.get_fastpath_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_anomaly_enabled(),
    )


def within_modes() -> bool:
    """Whether modes of PyTorch or hooks of all modules are around, which see whatever runs."""
    stacks = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
    return any(stacks) or any(_hooks_of_all_modules())


def _hooks_of_all_modules() -> tuple[tuple[int, ...], ...]:
    hooks = torch.nn.modules.module
    return (
        tuple(hooks._global_forward_pre_hooks),
        tuple(hooks._global_forward_hooks),
        tuple(hooks._global_backward_pre_hooks),
        tuple(hooks._global_backward_hooks),
    )


def _default_device() -> torch.device:
    """Return where new tensors lie: on the CPU where no mode is around that says otherwise."""
    return torch.get_default_device() if torch._C._len_torch_function_stack() else _CPU
