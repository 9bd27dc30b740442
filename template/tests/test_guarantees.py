"""Documents name tests by their ids; a test that is renamed, moved or gone must not be relied on."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from template.tests.paths import ROOT

# By folder of pages, what the tests that they name are relative to.
BASES = {ROOT: ROOT, ROOT / "docs": ROOT, ROOT / "machinery" / "docs": ROOT / "machinery"}
GUIDE = ROOT / "docs" / "adopting.md"  # the guide: its paths are those of examples/shop
# A file that a page shows is named in front of it: `PATH`:
NAMED = re.compile(r"`([\w./]+/test_\w+\.py(?:::\w+)*)`(?!:\n)")
# `…::test_x`, or a file without its folder: an id that a reader has to put together is an id that no test checks.
SHORT = re.compile(r"`(?:…[^`]*test_[^`]*|…::[^`]*|test_\w+\.py[^`]*|::[^`]*)`")
PAGES = sorted(page for folder in BASES for page in folder.glob("*.md"))


def ids(file: Path) -> Iterator[str]:
    """The ids of a file, of its tests, and of its classes and their tests."""
    name = file.as_posix()
    yield name
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name.startswith(("test_", "Test")):
            yield f"{name}::{node.name}"
            yield from (
                f"{name}::{node.name}::{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)
            )


@cache
def defined() -> frozenset[str]:
    """The id of everything that a document may name."""
    return frozenset(
        found
        for folder in ("tests", "template/tests", "proof/tests", "machinery/tests", "examples/shop/tests")
        for file in (ROOT / folder).rglob("test_*.py")
        for found in ids(file)
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_test_that_a_document_names_exists(page: Path) -> None:
    base = ROOT / "examples" / "shop" if page == GUIDE else BASES[page.parent]
    named = {os.path.normpath(base / name) for name in NAMED.findall(page.read_text())}
    assert named - defined() == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_document_names_a_test_by_its_whole_id(page: Path) -> None:
    assert SHORT.findall(page.read_text()) == []


@pytest.mark.parametrize("name", ["guarantees.md", "runbook.md"])
def test_what_is_promised_is_named(name: str) -> None:
    assert len(NAMED.findall((ROOT / "machinery" / "docs" / name).read_text())) > 10
