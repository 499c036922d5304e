"""Which front follows the Python of what is fitted in this run of the tests."""

from __future__ import annotations

import pytest

__all__ = ["THROUGH_DYNAMO", "of_dynamo", "of_the_tracer"]

THROUGH_DYNAMO = True
of_dynamo = pytest.mark.skipif(not THROUGH_DYNAMO, reason="here the tracer follows Python")
of_the_tracer = pytest.mark.skipif(THROUGH_DYNAMO, reason="here Dynamo follows Python")
