"""Idempotency-Keys and the transaction that they are claimed in, on the fixture domain's services."""

from __future__ import annotations

import pkgutil
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from sqlalchemy import Engine, event, text
from werkzeug.test import TestResponse

from outbox.base.settings import Settings, SourceRole
from outbox.base.wait import wait_for
from outbox.events import catalog
from outbox.http.idempotency import Answer, Key, first_answer
from outbox_lab.testing.helpers import Application, all_at_once, as_wsgi, outbox_records, query
from tests import items
from tests.stock import Client, audit
from tests.support.made_events import nth_key
from tests.support.services import SERVICES

CLIENTS = 8
TRACEPARENT = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
ITEM = nth_key(1)


@pytest.fixture(params=[*SERVICES.values()], ids=[*SERVICES])
def app(databases: Settings, request: pytest.FixtureRequest) -> Iterator[Application]:
    """The application of each framework, with a connection for each of eight clients."""
    with as_wsgi(pkgutil.resolve_name(request.param)(databases.replace(service_threads=CLIENTS))) as app:
        yield app


def refused(response: TestResponse, kind: str) -> None:
    assert (response.status_code, response.get_json(force=True)["type"]) == (409, f"/problems/{kind}"), response.text
    assert response.content_type == "application/problem+json"


def test_rows_event_and_answer_are_written_together(client: Client, databases: Settings) -> None:
    client.move(ITEM, 500)
    response = client.move(ITEM, -120, traceparent=TRACEPARENT)
    assert (response.status_code, response.get_json()["stock_after"]) == (201, 380)
    first, second = outbox_records(databases)
    assert (first["headers"]["eventType"], first["headers"]["traceparent"]) == ("received", None)
    assert (second["headers"]["eventType"], second["headers"]["traceparent"]) == ("picked", TRACEPARENT)
    assert second["key"] == ITEM
    made = response.get_json()
    assert second["value"] == {
        "movement_id": made["id"],
        "item_id": ITEM,
        "quantity": -120,
        "unit": "KGM",
        "stock_after": 380,
        "version": 2,
        "occurred_at": made["occurred_at"],
    }
    for one in (first, second):
        version = int(one["headers"]["schemaVersion"])
        schema = catalog.of_project(databases).schema(items.AGGREGATE, one["headers"]["eventType"], version)
        schema.require_valid(one["value"])
    assert audit(databases) == {}


def test_the_same_key_and_body_give_the_first_answer_again(client: Client, databases: Settings) -> None:
    first, second = (client.move(ITEM, 60, key="k") for _ in range(2))
    assert (first.status_code, first.data) == (second.status_code, second.data)
    assert len(outbox_records(databases)) == 1
    assert audit(databases) == {}


def test_the_same_key_with_another_body_is_409(client: Client, databases: Settings) -> None:
    assert client.move(ITEM, 60, key="k").status_code == 201
    refused(client.move(ITEM, 61, key="k"), "idempotency-key-reused")
    assert len(outbox_records(databases)) == 1


def test_an_invalid_request_does_not_use_its_key_up(client: Client) -> None:
    assert client.move(ITEM, 0, key="k").status_code == 422
    assert client.move(ITEM, 60, key="k").status_code == 201


def test_an_expired_key_may_be_used_again(client: Client, databases: Settings) -> None:
    assert client.move(ITEM, 60, key="k").status_code == 201
    query(databases, "UPDATE idempotency_keys SET expires_at = now() WHERE key = 'k'")
    assert client.move(ITEM, 1, key="k").status_code == 201
    refused(client.move(ITEM, 60, key="k"), "idempotency-key-reused")


def test_a_key_is_kept_as_long_as_the_setting_says(client: Client, databases: Settings) -> None:
    client.move(ITEM, 1)
    assert query(databases, "SELECT round(extract(epoch FROM expires_at - now()) / 3600) FROM idempotency_keys") == [
        (databases.idempotency_ttl_hours,)
    ]


def test_expired_keys_are_deleted_as_new_ones_are_claimed(client: Client, databases: Settings) -> None:
    for _ in range(11):
        client.move(ITEM, 1)
    query(databases, "UPDATE idempotency_keys SET expires_at = now()")
    for _ in range(6):
        client.move(ITEM, 1)
    assert query(databases, "SELECT count(*), count(*) FILTER (WHERE expires_at > now()) FROM idempotency_keys") == [
        (6, 6)
    ]


def test_of_requests_with_one_key_at_once_all_get_one_answer(app: Application, databases: Settings) -> None:
    clients = [Client(app, databases) for _ in range(CLIENTS)]
    for attempt in range(5):
        answers = all_at_once(CLIENTS, lambda number: clients[number].move(ITEM, 10, key=f"k{attempt}"))  # noqa: B023
        assert {answer.status_code for answer in answers} == {201}
        assert len({answer.data for answer in answers}) == 1
    assert len(outbox_records(databases)) == 5
    assert audit(databases) == {}


def test_of_different_requests_with_one_key_at_once_one_is_made(app: Application, databases: Settings) -> None:
    # Different items, so that nothing but the key brings them together.
    clients = [Client(app, databases) for _ in range(CLIENTS)]
    for attempt in range(5):
        answers = all_at_once(CLIENTS, lambda n: clients[n].move(nth_key(n), 1, key=f"k{attempt}"))  # noqa: B023
        assert Counter(answer.status_code for answer in answers) == {201: 1, 409: CLIENTS - 1}
    assert len(outbox_records(databases)) == 5
    assert audit(databases) == {}


def test_a_request_takes_over_the_key_of_one_that_is_rolled_back(databases: Settings, engine: Engine) -> None:
    key = Key("POST /movements", "k", b"hash", ttl_hours=1)

    def ask() -> Answer:
        with engine.begin() as connection:
            return first_answer(connection, key, Answer(201, "second"))

    with engine.connect() as first, ThreadPoolExecutor(1) as pool:
        assert first_answer(first, key, Answer(201, "first")) == Answer(201, "first")
        second = pool.submit(ask)
        waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        wait_for("the second to wait", lambda: query(databases, waiting, SourceRole.APP), timeout_s=10)
        first.rollback()
        assert second.result(10) == Answer(201, "second")


def test_a_key_that_expires_between_claim_and_answer_is_not_deleted(databases: Settings, engine: Engine) -> None:
    key = Key("POST /movements", "k", b"hash", ttl_hours=1)
    kept: list[list[tuple[object, ...]]] = []

    def claim_another(*_: object) -> None:
        if not kept:
            kept.append([])
            with engine.begin() as other:
                first_answer(other, replace(key, key="other"), Answer(201, "other"))
            kept[0] = query(databases, "SELECT key FROM idempotency_keys WHERE expires_at <= now()")

    with engine.begin() as first:
        first_answer(first, key, Answer(201, "first"))
    with engine.begin() as second:
        second.execute(text("SELECT 1"))  # its time is that of its first statement
        query(databases, "UPDATE idempotency_keys SET expires_at = clock_timestamp()")
        event.listen(second, "after_cursor_execute", claim_another)
        assert first_answer(second, key, Answer(201, "second")) == Answer(201, "first", is_repeated=True)
    assert kept == [[("k",)]], "others see it expired, and find it locked"


def test_keys_are_in_our_table_whatever_the_search_path_finds_first(databases: Settings, engine: Engine) -> None:
    query(databases, "CREATE SCHEMA app")
    query(databases, "CREATE TABLE app.idempotency_keys (LIKE public.idempotency_keys INCLUDING INDEXES)")
    app = databases.role_name(SourceRole.APP)
    query(databases, f"GRANT USAGE ON SCHEMA app TO {app}; GRANT ALL ON app.idempotency_keys TO {app}")
    query(databases, f"ALTER DATABASE {databases.source_db_url.name} SET search_path = app, public")
    key = Key("POST /movements", "k", b"hash", ttl_hours=1)
    for is_repeated in (False, True):
        with engine.begin() as connection:
            assert first_answer(connection, key, Answer(201, "made")).is_repeated == is_repeated
    assert query(databases, "SELECT key FROM public.idempotency_keys") == [("k",)]
    assert query(databases, "SELECT key FROM app.idempotency_keys") == []
