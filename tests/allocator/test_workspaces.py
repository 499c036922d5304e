"""What libraries keep is constant; what a product takes and lets go of is its workspace."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tightfit.costs.measured.call import measure_workspace
from tightfit.torch_private import tools

MIB = 1 << 20
DEVICE = torch.device("cuda:0")


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("can_clear", [True, False])
def test_a_workspace_that_is_kept_is_a_constant(
    monkeypatch: pytest.MonkeyPatch, keeps: bool, can_clear: bool
) -> None:
    """Tried with a stand-in: before PyTorch 2.15 it is kept, for each stream and thread."""
    allocated = [100 * MIB]

    def multiply(device: torch.device) -> None:
        allocated[0] += 2 * 8 * MIB * keeps

    monkeypatch.setattr(tools, "_CUBLAS_BYTES", {})
    monkeypatch.setattr(tools, "_multiply", multiply)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated[0])
    stream = SimpleNamespace(cuda_stream=7)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    if can_clear:
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    else:
        monkeypatch.delattr(torch._C, "_cuda_clearCublasWorkspaces", raising=False)
    assert tools.cublas_workspace_bytes(DEVICE) == (16 * MIB if keeps else 0)
    assert tools.cublas_workspace_bytes(DEVICE) == (16 * MIB if keeps else 0)


def test_what_a_product_lets_go_of_is_its_workspace() -> None:
    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        workspace = torch.empty(8 * MIB, dtype=torch.uint8)
        made = a @ b
        del workspace
        return made

    given = [torch.randn(64, 64) for _ in range(2)]
    assert measure_workspace(product, given, {}, device="cpu").workspace_bytes == 8 * MIB
