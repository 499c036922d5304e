"""The examples in the documentation, so that tests read what people read."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def example_of(document: str) -> bytes:
    """Return the first JSON example of a file in ``docs/``."""
    found = re.search(r"```json\n(.*?)```", (DOCS / document).read_text("utf-8"), re.DOTALL)
    assert found is not None
    return found[1].encode()
