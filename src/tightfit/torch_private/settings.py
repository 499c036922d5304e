"""The settings of PyTorch that decide which operators run, and how new tensors are made."""

from __future__ import annotations

from typing import Any

import torch

_CPU = torch.device("cpu")


def global_settings() -> tuple[Any, ...]:
    """Return settings that decide, with modules and inputs, which operators a forward runs.

    The hooks of all modules, type and device of new tensors, which kernels may be chosen.
    """
    return (
        *map(tuple, hooks_of_all_modules()),
        torch.get_default_dtype(),
        _default_device(),
        torch.are_deterministic_algorithms_enabled(),
        *choices_of_kernels(),
    )


def choices_of_kernels() -> tuple[bool, ...]:
    """Return which kernels PyTorch may choose."""
    return (
        torch._C._get_cudnn_enabled(),
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
    )


def settings_of_kernels() -> tuple[Any, ...]:
    """Return settings that PyTorch's own code reads before it chooses an operator."""
    return (
        torch._C._get_mkldnn_enabled(),
        torch.get_float32_matmul_precision(),
        torch.backends.mha.get_fastpath_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_anomaly_enabled(),
    )


def within_modes() -> bool:
    """Whether modes of PyTorch or hooks of all modules are active, which see every operator."""
    stacks = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
    return any(stacks) or any(hooks_of_all_modules())


def hooks_of_all_modules() -> tuple[dict[int, Any], ...]:
    """Return the hooks that all modules call, as PyTorch holds them: one dictionary for a kind."""
    hooks = torch.nn.modules.module
    return (
        hooks._global_forward_pre_hooks,
        hooks._global_forward_hooks,
        hooks._global_backward_pre_hooks,
        hooks._global_backward_hooks,
    )


def _default_device() -> torch.device:
    """Return the device of new tensors: the CPU where no active mode says another."""
    return torch.get_default_device() if torch._C._len_torch_function_stack() else _CPU
