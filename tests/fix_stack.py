"""One embedded stack for the whole session, on free ports, in a folder of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from outbox.base.settings import Settings, load
from outbox.stack.postgres import Postgres
from outbox.stack.stack import Stack
from tests.support.homes import TEST_HOMES, Homes

STARTED_AT = pytest.StashKey[float]()


def private_stack(home: Path) -> Stack:
    """A stack that nobody else uses: what a test may break."""
    return Stack(
        load(
            home,
            environment=False,
            stack_postgres_port=0,
            stack_kafka_port=0,
            stack_controller_port=0,
            stack_connect_port=0,
            service_port=0,
        )
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STARTED_AT] = time.time()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Where the logs are, if a test failed. Here, as what a fixture prints in one of several processes is lost."""
    for logs in TEST_HOMES.glob("*/*/logs"):
        if logs.stat().st_mtime >= config.stash[STARTED_AT]:
            terminalreporter.write_line(f"logs of the stack: {logs}")


@pytest.fixture(scope="session")
def homes(request: pytest.FixtureRequest) -> Iterator[Homes]:
    """Folders for stacks; at the end all that runs in them is stopped. Their logs are kept if a test failed."""
    made = Homes()
    yield made
    made.close(keep_logs=request.session.testsfailed > 0)


@pytest.fixture
def home(homes: Homes) -> Path:
    """A folder for a stack, or another controlled process, of this test alone."""
    return homes.new("test")


@pytest.fixture(scope="session")
def stack_home(homes: Homes) -> Path:
    """The folder of the session's stack."""
    return homes.new("stack")


@pytest.fixture(scope="session")
def postgres_stack(stack_home: Path) -> Stack:
    """The session's stack with Postgres running, and nothing more unless another test asked for it."""
    stack = private_stack(stack_home)
    stack.up(only=["postgres"])
    return stack


@pytest.fixture(scope="session")
def postgres(postgres_stack: Stack) -> Postgres:
    """The session's Postgres."""
    return Postgres(postgres_stack.settings)


@pytest.fixture(scope="session")
def stack(postgres_stack: Stack) -> Stack:
    """The session's stack, all of it running."""
    postgres_stack.up()
    return postgres_stack


@pytest.fixture(scope="session")
def stack_settings(stack: Stack) -> Settings:
    """Settings of the whole stack. Databases and topic in them are nobody's: use ``chain`` or ``databases``."""
    return stack.settings
