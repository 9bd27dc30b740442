"""Shared by tests of the fixture domain: its services, their clients, and an audit of its books."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests
from werkzeug.test import TestResponse

from outbox.base import project
from outbox.base.settings import Settings
from outbox_lab.stack.command import ServiceCommand, service
from outbox_lab.testing.helpers import ServiceClient, query
from tests.support import suite

# One in each framework, with the same routes.
SERVICES = {"flask": "stock.service:create_app", "fastapi": "stock.async_service:create_app"}


def project_of(service: str, folder: Path) -> Path:
    """A copy of the fixture domain that runs this service."""
    root = suite.copied_to(folder / "project")
    file = root / project.FILE
    file.write_text(file.read_text().replace(SERVICES["flask"], service))
    return root


class Client(ServiceClient):
    """A client of the stock service."""

    def move(
        self, item: str, quantity: int, unit: str = "KGM", *, key: str | None = None, **headers: str
    ) -> TestResponse:
        """Record a movement, with a key of its own if none is given."""
        body = {"item_id": item, "quantity": quantity, "unit": unit}
        return self.post("/movements", body, Idempotency_Key=key or str(uuid.uuid4()), **headers)


@contextmanager
def serving(settings: Settings) -> Iterator[ServiceCommand]:
    """The service as a process; asked to stop at the end of the block."""
    process = service(settings)
    process.start()
    try:
        yield process
    finally:
        process.stop()


def move(settings: Settings, quantity: int = 7, traceparent: str | None = None) -> requests.Response:
    """Ask the service that runs as a process for a movement of a new item."""
    headers = {
        "Authorization": f"Bearer {settings.service_token.get_secret_value()}",
        "Idempotency-Key": str(uuid.uuid4()),
        "traceparent": traceparent,
    }
    movement = {"item_id": str(uuid.uuid4()), "quantity": quantity, "unit": "KGM"}
    url = f"{settings.service_url}/movements"
    return requests.post(url, json=movement, headers=headers, timeout=30)


# What must never be found in the books, and the query that finds it.
EVENTS = """(
    SELECT id AS event_id, aggregateid AS key, (payload ->> 'quantity')::numeric AS quantity,
           (payload ->> 'stock_after')::numeric AS stock_after, (payload ->> 'version')::bigint AS version
      FROM outbox) AS events"""
WRONG = {
    "items that are not the sum of their events": f"""
        SELECT items.id, stock, items.version, count(event_id), sum(quantity)
          FROM items LEFT JOIN {EVENTS} ON key = items.id::text
         GROUP BY items.id
        HAVING stock <> coalesce(sum(quantity), 0) OR items.version <> count(event_id)""",
    "versions that are not 1, 2, 3": f"""
        SELECT key, version
          FROM (SELECT key, version, row_number() OVER (PARTITION BY key ORDER BY version) AS due FROM {EVENTS}) AS one
         WHERE version <> due""",
    "events whose stock_after is not the sum until then": f"""
        SELECT event_id
          FROM (SELECT event_id, stock_after, sum(quantity) OVER (PARTITION BY key ORDER BY version) AS due
                  FROM {EVENTS}) AS found
         WHERE stock_after <> due""",
    "answers without their event": """
        SELECT key
          FROM idempotency_keys
          LEFT JOIN outbox ON outbox.payload ->> 'movement_id' = idempotency_keys.body::json ->> 'id'
         WHERE status = 201 AND outbox.id IS NULL""",
}


def audit(settings: Settings) -> dict[str, list[tuple[Any, ...]]]:
    """Errors in the books; empty if they are right."""
    found = {name: query(settings, sql) for name, sql in WRONG.items()}
    return {name: rows for name, rows in found.items() if rows}
