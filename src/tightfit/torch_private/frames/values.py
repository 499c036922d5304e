"""Dynamo follows Python where data decide in it, for the values of this call. Private names."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch._functorch.config as functorch
from torch._dynamo import config
from torch.fx.experimental import symbolic_shapes

from tightfit.torch_private.patches import Patch

_UNUSED_SIZES = getattr(symbolic_shapes, "_ignore_fresh_unbacked_symbols_tls_context", None)


def follows_values() -> bool:
    """Whether this PyTorch can."""
    return _UNUSED_SIZES is not None


@contextlib.contextmanager
def following_values() -> Iterator[None]:
    """Have Dynamo compute while it follows, so that data may decide sizes and numbers.

    `torch.export` has this as `draft_export`. Its result for a frame is for these values only.
    """
    assert _UNUSED_SIZES is not None
    logger = logging.getLogger(symbolic_shapes.__name__)  # which tells each decision
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with (
            config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True),
            functorch.patch(fake_tensor_propagate_real_tensors=True),
            _UNUSED_SIZES(),
            _released_afterwards(),
        ):
            yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def _released_afterwards() -> Iterator[None]:
    """Release the tensors that were computed: sizes hold them in cycles that are not collected."""
    made: list[symbolic_shapes.ShapeEnv] = []

    def noted(init: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        made.append(self)

    try:
        with _MAKE_SHAPES.by(noted):
            yield
    finally:
        for sizes in made:
            if sizes.tracked_fakes is not None:
                sizes.tracked_fakes.clear()
        for each in vars(symbolic_shapes.ShapeEnv).values():
            if hasattr(each, "cache_clear"):
                each.cache_clear()


_MAKE_SHAPES = Patch(symbolic_shapes.ShapeEnv, "__init__")
