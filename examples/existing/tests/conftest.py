"""The tests of the service and of its sink, on databases that have the outbox already."""

from __future__ import annotations

import os
from collections.abc import Iterator

import django
import pytest
from django.core.management import call_command
from django.db import connection
from django.http import HttpResponse
from django.test import Client
from outbox import Settings
from outbox_lab.testing import SourceRole

pytest_plugins = ["outbox_lab.testing.plugin"]
os.environ["DJANGO_SETTINGS_MODULE"] = "library.settings"
django.setup()


class Library:
    """The service in this process."""

    def __init__(self) -> None:
        self._client = Client()

    def lend(self, isbn: str, reader: str = "R-17") -> HttpResponse:
        """Lend a copy."""
        return self._post(f"/books/{isbn}/lend", {"reader": reader})

    def give_back(self, isbn: str, reader: str = "R-17") -> HttpResponse:
        """Bring a copy back."""
        return self._post(f"/books/{isbn}/give-back", {"reader": reader})

    def _post(self, path: str, body: object) -> HttpResponse:
        return self._client.post(path, body, content_type="application/json")


@pytest.fixture
def library(databases: Settings) -> Iterator[Library]:
    """The service on a database that its own migrations have prepared."""
    dsn = databases.dsn(SourceRole.OWNER)
    connection.close()
    connection.settings_dict |= {"HOST": dsn["host"], "PORT": dsn["port"], "NAME": dsn["dbname"]}
    connection.settings_dict |= {"USER": dsn["user"], "PASSWORD": dsn["password"]}
    call_command("migrate", verbosity=0)
    yield Library()
    connection.close()
