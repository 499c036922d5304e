"""State in far memory: which tensors go there, and what they are then."""

from __future__ import annotations

from pathlib import Path

import torch

import tightfit
from tightfit.session.memory.far_state import FarState, is_mapped
from tightfit.session.memory.forecast import FAR_BYTES


def test_large_dense_tensors_are_mapped_and_stay_what_they_were(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(
        torch.randn(8, 3, 64, 64).contiguous(memory_format=torch.channels_last)
    )
    optimizer = torch.optim.Adam([parameter])
    large, small = torch.randn_like(parameter), torch.tensor(3.0)
    strided, sparse = torch.randn(512, 512)[:, ::2], torch.eye(512).to_sparse()
    state = {"large": large, "small": small, "strided": strided, "sparse": sparse, "none": None}
    optimizer.state[parameter] = state
    expected = large.clone()
    far = FarState(optimizer, tightfit.Offload("64MiB", folder=tmp_path))
    far.keep_all()
    assert [name for name, x in state.items() if x is not None and is_mapped(x)] == ["large"]
    assert torch.equal(large, expected) and large.stride() == parameter.stride()
    assert far.held_bytes() == large.nbytes >= FAR_BYTES
    assert not any(tmp_path.iterdir())
    far.keep_all()
    assert torch.equal(large.add_(1), expected + 1)
