"""Tests of this repository: its files agree with each other, and copies and projects made of them work."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from xdist.scheduler import LoadScopeScheduling

from template.tests import scratch

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import Scheduling

GENERATED = "test_bake.py"  # its parameters are projects
FIRST = ("test_guide.py", "test_update.py")  # these take longest
pytest_plugins = ["outbox_lab.testing.plugin"]


class Distribution(LoadScopeScheduling):  # type: ignore[misc]  # without type hints
    """The tests of one generated project, or of one class, run in one process; other tests in any.

    xdist's own groups do not work with pytest 9.2, which takes an item's id from elsewhere.
    """

    def _split_scope(self, nodeid: str) -> str:
        scope, _, test = nodeid.rpartition("::")
        project = test.partition("[")[2]
        if "::" in scope:
            return scope
        return project if project and scope.endswith(GENERATED) else nodeid


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests into the order in which they begin."""
    items.sort(key=lambda item: item.path.name not in FIRST)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling:
    return Distribution(config, log)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In several processes, the one that the user has started ends last."""
    if not hasattr(session.config, "workerinput"):
        scratch.clean()
