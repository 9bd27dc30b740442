"""The machinery's tests work for the fixture domain, and know no other."""

from __future__ import annotations

from tests.support import suite

suite.choose(suite.DOMAIN)  # before anything else is imported

import pytest  # noqa: E402
from flask import Flask  # noqa: E402

from outbox.base.settings import Settings  # noqa: E402
from tests.machinery.stock import Client  # noqa: E402

pytest_plugins = suite.FIXTURES


@pytest.fixture
def client(app: Flask, databases: Settings) -> Client:
    """A client of the application."""
    return Client(app, databases)
