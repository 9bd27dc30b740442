"""Who may import whom: samples and examples import the machinery's public API, and not each other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from template.tests.paths import ROOT

PACKAGES = ("service", "sinks", "migrations", "demo", "tests")
SAMPLES = (
    *(*PACKAGES, "connect"),
    *(f"template/minimal/{folder}" for folder in PACKAGES),
    "template/minimal-fastapi/service",
    *(f"examples/async/{folder}" for folder in ("service", "sinks", "migrations", "tests")),
    *(f"examples/{name}/{folder}" for name in ("couriers", "warehouse") for folder in ("sinks", "migrations", "tests")),
    *(f"examples/shop/{folder}" for folder in (*PACKAGES, "connect")),
    *(f"examples/existing/{folder}" for folder in ("library", "loans", "sinks", "migrations", "tests")),
)
WITHOUT_OUTBOX = {"connect", "library"}  # functions that expand events, and what is Django's alone
PUBLIC = {
    *(
        "outbox",
        "outbox.aio",
        "outbox.asgi",
        "outbox.dbapi",
        "outbox.handlers",
        "outbox.migrations",
        "outbox.sinks",
        "outbox_lab.soak",
        "outbox.spark",
        "outbox.targets",
        "outbox_lab.walkthrough",
        "outbox.web",
    ),
    *("outbox_lab.testing", "outbox_lab.testing.contract"),
}
# What each package of a project may import of the others.
OTHERS = {
    "service": set[str](),
    "library": {"loans"},
    "loans": set[str](),
    "connect": set[str](),
    "sinks": set[str](),
    "migrations": set[str](),
    "demo": set[str](),
    "tests": {"service", "loans", "sinks"},
}


def imported(folder: str) -> Iterator[tuple[str, str]]:
    """Of each file of a folder, the modules that it imports."""
    for file in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                yield from ((file.relative_to(ROOT).as_posix(), alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield file.relative_to(ROOT).as_posix(), node.module


@pytest.mark.parametrize("folder", SAMPLES)
def test_a_sample_imports_the_public_api_only(folder: str) -> None:
    every = set(imported(folder))
    assert every, "it has no modules"
    found = {(file, module) for file, module in every if module.partition(".")[0] in {"outbox", "outbox_lab"}}
    assert found or Path(folder).name in WITHOUT_OUTBOX, "it imports nothing of it"
    assert {one for one in found if one[1] not in PUBLIC} == set()


@pytest.mark.parametrize("folder", SAMPLES)
def test_service_and_sinks_share_declared_events_only(folder: str) -> None:
    package = Path(folder).name
    others = OTHERS.keys() - OTHERS[package] - {package}
    assert {one for one in imported(folder) if one[1].partition(".")[0] in others} == set()
