"""The tests of this project's own domain."""

from __future__ import annotations

import uuid

import pytest
from outbox import Settings
from outbox_lab.testing import Application, ServiceClient
from werkzeug.test import TestResponse

pytest_plugins = ["outbox_lab.testing.plugin"]


class Client(ServiceClient):
    """A client of the service."""

    def pass_by(self, way: str, garage: str = "north", car: str = "ZH 1", key: str | None = None) -> TestResponse:
        """Let a car in or out, with a key of its own if none is given."""
        return self.post(f"/{way}", {"garage": garage, "car": car}, Idempotency_Key=key or str(uuid.uuid4()))


@pytest.fixture
def client(app: Application, databases: Settings) -> Client:
    """A client of the application."""
    return Client(app, databases)
