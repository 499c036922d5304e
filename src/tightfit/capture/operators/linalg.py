"""Checks of factorizations (`torch.linalg.inv`, `solve`, `cholesky`) in a trace.

Whether a matrix was singular is checked by an operator without a result. The tracer would keep its
place among others by a token that each such check takes and returns. In a plan it is an op like
others: it reads the numbers that tell, and raises the error of plain PyTorch.
"""

from __future__ import annotations

import torch

aten = torch.ops.aten

_CHECK = aten._linalg_check_errors.default
_LIBRARY = torch.library.Library("tightfit", "FRAGMENT")
# the tag keeps it in a trace although its result is not read
_LIBRARY.define(
    "checked(Tensor info, str name, bool is_matrix) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)


def is_check(node: torch.fx.Node) -> bool:
    return node.target is torch.ops.tightfit.checked.default


def check_errors(info: torch.Tensor, api_name: str, *, is_matrix: bool) -> None:
    """Check a factorization by an op with a result."""
    torch.ops.tightfit.checked(info, api_name, is_matrix)


@torch.library.impl(_LIBRARY, "checked", "CompositeExplicitAutograd")
def _checked(info: torch.Tensor, name: str, is_matrix: bool) -> torch.Tensor:
    _CHECK(info, name, is_matrix=is_matrix)
    return info.new_empty(1, dtype=torch.uint8)


@torch.library.register_fake("tightfit::checked")
def _fake_checked(info: torch.Tensor, name: str, is_matrix: bool) -> torch.Tensor:
    return info.new_empty(1, dtype=torch.uint8)
