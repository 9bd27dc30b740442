"""The page of reference: each example is part of a file that a test runs, and each name of a project has its line."""

from __future__ import annotations

import re
from dataclasses import fields
from textwrap import dedent

from outbox.base.project import FOLDERS, Project

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


def test_each_name_of_a_project_has_its_line_with_its_default() -> None:
    section = PAGE.read_text().partition("## `[tool.outbox]`")[2]
    lines = dict(re.findall(r"^\| `([\w-]+)` \| (?:`(.+?)`)? ?\|", section, re.MULTILINE))
    names = {one.name.replace("_", "-"): one.default for one in fields(Project) if one.name not in ("root", "folders")}
    assert lines.keys() == names.keys() | {*FOLDERS}
    assert {name: lines[name] for name in names} == {**{name: str(of) for name, of in names.items()}, "sinks": "[]"}
