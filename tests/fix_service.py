"""The ledger service in this process, on the databases of the test."""

from __future__ import annotations

import pytest
from flask import Flask

from outbox.base.settings import Settings
from service.app import create_app
from tests.ledger import Client


@pytest.fixture
def app(databases: Settings) -> Flask:
    """The application, with a connection for each of eight clients."""
    return create_app(databases.model_copy(update={"service_threads": 8}))


@pytest.fixture
def client(app: Flask, databases: Settings) -> Client:
    """A client of the application."""
    return Client(app, databases)
