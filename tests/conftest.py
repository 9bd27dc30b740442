"""The tests of the ledger."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from flask import Flask
from outbox import Settings

from tests.ledger import Client

pytest_plugins = ["outbox_lab.testing.plugin"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test an id of its own. Several processes tell them apart by that, and would run one of those that share
    one: schemathesis puts the operation into a test's name and not into its id.
    """
    for item in items:
        if not item.nodeid.endswith(item.name):
            item._id = replace(item.id, names=(*item.id.names[:-1], item.name))  # noqa: SLF001 (pytest has no public way)
    shared = [name for name, count in Counter(item.nodeid for item in items).items() if count > 1]
    if shared:
        raise pytest.UsageError(f"several tests have the id {shared[0]}")


@pytest.fixture
def client(app: Flask, databases: Settings) -> Client:
    """A client of the application."""
    return Client(app, databases)
