"""Examples of docs/reference.md: tests on a real Postgres."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from werkzeug.test import TestResponse

from outbox import Event, Failure, Settings
from outbox_lab.testing import (
    Application,
    ServiceClient,
    SinkRole,
    SourceRole,
    all_at_once,
    as_wsgi,
    check_events,
    chosen_seed,
    deliver,
    differing_keys,
    outbox_records,
    query,
    rebuild,
    seeded,
)
from stock.async_service import create_app

SINK = "dedup"
ITEM = "01a1fc75-167d-7239-af57-d1ee1a62e0a6"


class Client(ServiceClient):
    def move(self, quantity: int) -> TestResponse:
        body = {"item_id": ITEM, "quantity": quantity, "unit": "KGM"}
        return self.post("/movements", body, Idempotency_Key=str(uuid.uuid4()))


def test_the_stock_follows_the_movements(app: Application, databases: Settings) -> None:
    client = Client(app, databases)
    assert client.move(3).status_code == 201
    assert client.get("/movements").status_code == 405
    deliver(databases, outbox_records(databases), SINK)
    deliver(databases, outbox_records(databases), SINK)  # sent again: applied once
    assert query(databases, f"SELECT stock FROM stock WHERE sink = '{SINK}'", SinkRole.OWNER) == [(3,)]


def test_the_sink_agrees_with_the_source(app: Application, databases: Settings) -> None:
    Client(app, databases).move(3)
    assert differing_keys(databases, SINK) == {"stock": {ITEM}}  # nothing is delivered yet
    assert rebuild(databases, SINK) == {ITEM: 3}
    assert differing_keys(databases, SINK) == {"stock": set()}


def test_movements_at_once(app: Application, databases: Settings) -> None:
    seed = chosen_seed()

    def move(number: int) -> int:
        return Client(app, databases).move(seeded(seed, number).randint(1, 9)).status_code

    assert all_at_once(8, move) == [201] * 8
    events = "SELECT sum((payload ->> 'quantity')::int) FROM outbox"
    assert query(databases, "SELECT total FROM source_totals", SourceRole.AUDITOR) == query(databases, events)


def test_a_rule_makes_a_valid_event() -> None:
    payload = {"order_id": ITEM, "version": 2, "occurred_at": datetime.now(UTC)}
    check_events(Event("order", ITEM, "cancelled", payload))
    with pytest.raises(Failure, match="version"):
        check_events(Event("order", ITEM, "cancelled", {**payload, "version": 0}))


@pytest.fixture
def client(databases: Settings) -> Iterator[ServiceClient]:
    with as_wsgi(create_app(databases)) as app:
        yield ServiceClient(app, databases)


def test_both_services_read_what_one_has_moved(app: Application, client: ServiceClient, databases: Settings) -> None:
    in_flask = Client(app, databases)
    assert in_flask.move(3).status_code == 201
    for service in (in_flask, client):
        assert service.get(f"/items/{ITEM}").get_json() == {"unit": "KGM", "stock": 3, "version": 1}
        assert [service.get(f"/items/{item}").status_code for item in (uuid.uuid4(), "7")] == [404, 404]
