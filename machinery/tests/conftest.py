"""The tests work for the fixture domain, and know no other."""

from __future__ import annotations

from tests.support import suite

suite.choose(suite.DOMAIN)  # before anything else is imported

from typing import TYPE_CHECKING  # noqa: E402

import pytest  # noqa: E402
from flask import Flask  # noqa: E402

from outbox.base.settings import Settings  # noqa: E402
from tests.stock import Client  # noqa: E402
from tests.support import distribution  # noqa: E402

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import Scheduling

pytest_plugins = suite.FIXTURES


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    distribution.order(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling:
    return distribution.Distribution(config, log)


@pytest.fixture
def client(app: Flask, databases: Settings) -> Client:
    """A client of the application."""
    return Client(app, databases)
