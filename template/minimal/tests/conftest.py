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

    def arrive(self, depot: str, count: object, key: str | None = None, **headers: str) -> TestResponse:
        """Record an arrival, with a key of its own if none is given."""
        return self.post(
            "/parcels", {"depot_id": depot, "count": count}, Idempotency_Key=key or str(uuid.uuid4()), **headers
        )


@pytest.fixture
def client(app: Application, databases: Settings) -> Client:
    """A client of the application."""
    return Client(app, databases)
