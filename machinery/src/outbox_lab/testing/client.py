"""A client of the service in this process."""

from __future__ import annotations

from flask import Flask
from werkzeug.test import TestResponse

from outbox.base.settings import Settings


class ServiceClient:
    """Sends requests with the token. One for each thread."""

    def __init__(self, app: Flask, settings: Settings) -> None:
        self._http = app.test_client()
        self._authorization = {"Authorization": f"Bearer {settings.service_token.get_secret_value()}"}

    def post(self, path: str, body: object, **headers: str) -> TestResponse:
        """POST a body as JSON. Headers are given by name, a dash as an underscore."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self._http.post(path, json=body, headers={**self._authorization, **named})

    def get(self, path: str) -> TestResponse:
        """GET a path."""
        return self._http.get(path, headers=self._authorization)
