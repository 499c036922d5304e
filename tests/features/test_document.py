"""docs/features.md and the README say what the tests check."""

from __future__ import annotations

import write_features


def test_the_document_is_what_the_tests_check() -> None:
    stale = "stale: run python tests/write_features.py"
    assert write_features.DOCUMENT.read_text() == write_features.document(), stale
    readme = write_features.README.read_text()
    assert readme == write_features.with_section(readme), stale
