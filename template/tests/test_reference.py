"""The page of reference: each example is part of a file that a test runs."""

from __future__ import annotations

from textwrap import dedent

from template.tests import pages
from template.tests.pages import Excerpt
from template.tests.paths import ROOT

PAGE = ROOT / "machinery" / "docs" / "reference.md"
# What tests run: themselves, the fixture domain, and the page of the demo.
FILES = [
    file
    for folder in ("machinery/tests/reference", "machinery/tests/contract", "machinery/tests/domain", "demo/page")
    for file in sorted((ROOT / folder).rglob("*.py"))
] + [ROOT / "machinery" / "tests" / "conftest.py"]


def test_each_example_is_part_of_a_file_that_a_test_runs() -> None:
    blocks = [
        Excerpt("", dedent(found["block"]).strip("\n") + "\n") for found in pages.BLOCK.finditer(PAGE.read_text())
    ]
    assert len(blocks) > 10
    assert [block.text for block in blocks if not any(block.is_in(file) for file in FILES)] == []
