"""Code that is not run holds no memory, and runs when it is needed."""

from __future__ import annotations

import torch

from tightfit.allocator import code_bytes
from tightfit.allocator.code_pages import drop_code_pages


def test_what_was_run_before_is_given_back_and_runs_again() -> None:
    torch.linalg.svd(torch.randn(8, 8))
    before = code_bytes()
    drop_code_pages()
    assert code_bytes() < before - (8 << 20)
    left, singular, right = torch.linalg.svd(torch.eye(8))
    torch.testing.assert_close(left @ singular.diag() @ right, torch.eye(8))
