"""The device of modules, and what they will take of its memory."""

from __future__ import annotations

from collections.abc import Container, Mapping

import torch
from torch import nn

from tightfit.allocator.resident import resident_tensor_bytes
from tightfit.errors import BadInput
from tightfit.session.memory.optimizers import parameters_of
from tightfit.torch_private.tools import cublas_workspace_bytes

_WITHOUT_GPU = ("cpu", "meta")  # there is nothing yet of modules on "meta"


def device_of_modules(modules: Mapping[str, nn.Module]) -> torch.device:
    """Return the GPU that holds anything of the modules, else the CPU.

    Raises `BadInput` for another device: no limit is known to hold there.
    """
    for module in modules.values():
        for tensor in (*module.parameters(), *module.buffers()):
            device = tensor.device
            if device.type == "cuda":
                return device
            if device.type not in _WITHOUT_GPU:
                raise BadInput(
                    f"the model is on {device}: a budget holds on 'cpu' and 'cuda' devices only"
                )
    return torch.device("cpu")


def library_bytes(device: torch.device) -> int:
    """Return the bytes that libraries (cuBLAS) take of a device's allocator at their first use and
    keep."""
    used = device.type == "cuda" and torch.cuda.is_available()  # not for shapes of a GPU elsewhere
    return cublas_workspace_bytes(device) if used else 0


def new_gradient_bytes(
    modules: Mapping[str, nn.Module], granularity: int, counted: Container[int] = frozenset()
) -> int:
    """Return the bytes of the gradients that do not exist yet but will.

    `counted`: identities of parameters whose gradients are counted elsewhere.
    """
    trained = [p for p in parameters_of(modules) if p.requires_grad and id(p) not in counted]
    return resident_tensor_bytes([p for p in trained if p.grad is None], granularity)
