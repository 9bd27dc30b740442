"""What the three suites share. Each suite works for a project of its own, so each runs in a session of its own."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

SUITES = ("machinery", "sample", "template")
TESTS = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a session of several suites: the project that they work for is the whole process's."""
    asked = {_suite(Path(argument.partition("::")[0])) for argument in config.args}
    if len(asked) != 1 or None in asked:
        paths = ", ".join(f"tests/{name}" for name in SUITES)
        raise pytest.UsageError(f"the suites work for different projects: run one of {paths}, or `make test` for all")


def _suite(path: Path) -> str | None:
    absolute = path.absolute()
    below = absolute.relative_to(TESTS).parts if absolute.is_relative_to(TESTS) else ()
    return below[0] if below and below[0] in SUITES else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test an id of its own. Several processes tell them apart by that, and would run one of those that share
    one: schemathesis puts the operation into a test's name and not into its id.
    """
    for item in items:
        if not item.nodeid.endswith(item.name):
            item._id = replace(item.id, names=(*item.id.names[:-1], item.name))
    shared = [name for name, count in Counter(item.nodeid for item in items).items() if count > 1]
    if shared:
        raise pytest.UsageError(f"several tests have the id {shared[0]}")
