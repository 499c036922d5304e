"""Tests of what a release of PyTorch lacks are skipped, and say which has it."""

from __future__ import annotations

import pytest
import torch

from tightfit.torch_private.releases import Since


def why_not_here(since: Since) -> str:
    """Return why something cannot be tested here, if it cannot."""
    return (
        ""
        if since.is_available
        else f"PyTorch {torch.__version__}: from {since.name} on {since.what}"
    )


def needs(since: Since) -> pytest.MarkDecorator:
    """Return the mark of a test of something that older releases cannot do."""
    return pytest.mark.skipif(not since.is_available, reason=why_not_here(since))
