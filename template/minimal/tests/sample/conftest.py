"""The tests of this project's own domain."""

from __future__ import annotations

from tests.support import suite
from tests.support.paths import ROOT

suite.choose(ROOT)  # before anything else is imported

import uuid  # noqa: E402

import pytest  # noqa: E402
from flask import Flask  # noqa: E402
from werkzeug.test import TestResponse  # noqa: E402

from outbox.base.settings import Settings  # noqa: E402
from tests.support.service_client import ServiceClient  # noqa: E402

pytest_plugins = suite.FIXTURES


class Client(ServiceClient):
    """A client of the service."""

    def arrive(self, depot: str, count: object, key: str | None = None, **headers: str) -> TestResponse:
        """Record an arrival, with a key of its own if none is given."""
        return self.post(
            "/parcels", {"depot_id": depot, "count": count}, Idempotency_Key=key or str(uuid.uuid4()), **headers
        )


@pytest.fixture
def client(app: Flask, databases: Settings) -> Client:
    """A client of the application."""
    return Client(app, databases)
