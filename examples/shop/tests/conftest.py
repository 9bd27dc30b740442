"""The tests of this project's own domain."""

from __future__ import annotations

import uuid

import pytest
from flask import Flask
from outbox import Settings
from outbox_lab.testing import ServiceClient
from werkzeug.test import TestResponse

pytest_plugins = ["outbox_lab.testing.plugin"]
TEA = {"product": "TEA-1", "pieces": 2, "cents": 450}


class Client(ServiceClient):
    """A client of the service."""

    def add(self, product: str, pieces: int) -> None:
        """Put pieces on the shelf."""
        response = self.post("/stock", {"product": product, "pieces": pieces}, Idempotency_Key=str(uuid.uuid4()))
        assert response.status_code == 201, response.text

    def place(self, *lines: dict[str, object], key: str | None = None, **headers: str) -> TestResponse:
        """Place an order, of tea unless lines are given, with a key of its own if none is given."""
        return self.post("/orders", {"lines": lines or [TEA]}, Idempotency_Key=key or str(uuid.uuid4()), **headers)

    def cancel(self, order: str, key: str | None = None) -> TestResponse:
        """Cancel an order, with a key of its own if none is given."""
        return self.post(f"/orders/{order}/cancel", Idempotency_Key=key or str(uuid.uuid4()))


@pytest.fixture
def client(app: Flask, databases: Settings) -> Client:
    """A client of the application."""
    return Client(app, databases)
