"""docs/guarantees.md names the test of each promise; a test that is renamed or gone must not be promised on."""

from __future__ import annotations

import re

from outbox.settings import PROJECT_ROOT

NAMED = re.compile(r"::(test_\w+|Test\w+)")
DEFINED = re.compile(r"^\s*(?:def|class) (test_\w+|Test\w+)", re.MULTILINE)


def test_every_test_that_is_named_exists() -> None:
    named = set(NAMED.findall((PROJECT_ROOT / "docs" / "guarantees.md").read_text()))
    files = (PROJECT_ROOT / "tests").rglob("test_*.py")
    assert named - {name for file in files for name in DEFINED.findall(file.read_text())} == set()
    assert len(named) > 20
