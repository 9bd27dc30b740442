"""Guarantees and runbook name the test of each line; a test that is renamed or gone must not be relied on."""

from __future__ import annotations

import re

import pytest

from tests.support.paths import ROOT

NAMED = re.compile(r"::(test_\w+|Test\w+)")
FILES = re.compile(r"`(\w+/test_\w+\.py)")
DEFINED = re.compile(r"^\s*(?:def|class) (test_\w+|Test\w+)", re.MULTILINE)


@pytest.mark.parametrize("page", ["guarantees.md", "runbook.md"])
def test_every_test_that_is_named_exists(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    files = list((ROOT / "tests").rglob("test_*.py"))
    named, defined = set(NAMED.findall(text)), {name for file in files for name in DEFINED.findall(file.read_text())}
    assert named - defined == set()
    assert len(named) > 10
    assert {name for name in FILES.findall(text) if not (ROOT / "tests" / name).exists()} == set()
