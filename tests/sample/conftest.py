"""The sample's tests work for this repository's own project."""

from __future__ import annotations

from tests.support import suite
from tests.support.paths import ROOT

suite.choose(ROOT)  # before anything else is imported

import pytest  # noqa: E402
from flask import Flask  # noqa: E402

from outbox.base.settings import Settings  # noqa: E402
from tests.sample.ledger import Client  # noqa: E402

pytest_plugins = suite.FIXTURES


@pytest.fixture
def client(app: Flask, databases: Settings) -> Client:
    """A client of the application."""
    return Client(app, databases)
