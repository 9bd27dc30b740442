"""The tests work for the fixture domain, and know no other."""

from __future__ import annotations

from tests.support import suite

suite.choose(suite.DOMAIN)  # before anything else is imported

from datetime import UTC, datetime, timedelta  # noqa: E402
from typing import TYPE_CHECKING  # noqa: E402

import pytest  # noqa: E402
from flask import Flask  # noqa: E402
from xdist.scheduler import LoadScopeScheduling  # noqa: E402

from outbox.base.settings import Settings  # noqa: E402
from outbox.base.wait import timeout_scale, wait_for  # noqa: E402
from outbox.sink.decoding.values import STEP_MS  # noqa: E402
from tests.stock import Client  # noqa: E402

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import Scheduling

    from tests.support.sink_driver import Database
    from tests.support.sink_process import Publisher

pytest_plugins = ["outbox_lab.testing.plugin"]

LONGEST_TEST_S = 180  # of those that reckon by the day
STEP = timedelta(milliseconds=STEP_MS)

# What takes long in one process begins first: files with a stack of their own, then the chain, then short tests.
FIRST = (
    *("faults/", "recovery/test_servers.py", "integration/test_stack.py", "pipeline/test_bring_your_own.py"),
    *("pipeline/", "recovery/", "integration/"),
)
# Tests of the chain that share no fixture of their file: whichever process is free takes the next one.
SPREAD = frozenset(
    f"pipeline/test_{name}.py"
    for name in (
        *("audit", "chain", "relay", "rollout"),
        *("sink_limits", "sink_recovery", "sink_stream"),
    )
) | {"recovery/test_chain.py"}


def below_tests(nodeid: str) -> str:
    """The file of a test, from the folder of the tests on."""
    return nodeid.partition("::")[0].rpartition("tests/")[2]


class Distribution(LoadScopeScheduling):  # type: ignore[misc]  # without type hints
    """The tests of a file run in one process, one after the other, except those that are spread.

    Each process has a stack of its own.
    """

    def _split_scope(self, nodeid: str) -> str:
        return nodeid if below_tests(nodeid) in SPREAD else nodeid.partition("::")[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests into the order in which they begin."""

    def rank(item: pytest.Item) -> int:
        file = below_tests(item.nodeid)
        return next((rank for rank, beginning in enumerate(FIRST) if file.startswith(beginning)), len(FIRST))

    items.sort(key=rank)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling:
    return Distribution(config, log)


@pytest.fixture
def client(app: Flask, databases: Settings) -> Client:
    """A client of the application."""
    return Client(app, databases)


@pytest.fixture
def database(databases: Settings) -> Database:
    """The rows in the sink database of the test."""
    from tests.support.sink_driver import Database  # knows the project's jobs, which not every test needs

    return Database(databases)


@pytest.fixture
def publisher(topic: Settings) -> Publisher:
    """A producer of the test's topics, in the place of the connector."""
    from tests.support.sink_process import Publisher  # knows the project's jobs, which not every test needs

    return Publisher(topic)


@pytest.fixture
def whole_day() -> None:
    """Wait until midnight (UTC) is further away than a test can last, and so long ago that an id of now tells its day:
    retention reckons by the database's date, its tests by theirs.
    """
    needed = timedelta(seconds=LONGEST_TEST_S * timeout_scale())

    def is_far() -> bool:
        now = datetime.now(UTC)
        return (now - STEP).date() == (now + needed).date()

    wait_for("midnight to pass", is_far, timeout_s=2 * LONGEST_TEST_S)
