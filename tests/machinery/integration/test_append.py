"""append: events are in the outbox if and only if the caller's transaction is committed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sqlalchemy import Engine, event, text
from sqlalchemy.exc import IntegrityError, StatementError
from sqlalchemy.orm import Session

from outbox.base.settings import Settings
from outbox.writing.append import Event, append
from tests.support.queries import query

ROW = "aggregatetype, aggregateid, type, schema_version, payload, traceparent"


def rows(settings: Settings) -> list[tuple[Any, ...]]:
    return query(settings, f"SELECT {ROW} FROM outbox ORDER BY id")


def test_events_are_there_once_the_caller_commits_and_not_before(databases: Settings, engine: Engine) -> None:
    with engine.begin() as connection:
        append(connection, Event("order", "7", "order.placed", {"n": 1}))
        assert rows(databases) == []
    assert rows(databases) == [("order", "7", "order.placed", 1, {"n": 1}, None)]


def test_events_go_with_a_rollback(databases: Settings, engine: Engine) -> None:
    with engine.connect() as connection:
        append(connection, Event("order", "7", "order.placed", {}))
        connection.rollback()
    assert rows(databases) == []


def test_it_works_in_a_session_of_the_orm(databases: Settings, engine: Engine) -> None:
    with Session(engine) as session, session.begin():
        append(session.connection(), Event("order", "7", "order.placed", {}))
    assert len(rows(databases)) == 1


@pytest.mark.parametrize("count", [1, 2, 1500])
def test_any_number_of_events_is_inserted_in_order_without_returning(
    databases: Settings, engine: Engine, count: int
) -> None:
    statements: list[str] = []

    @event.listens_for(engine, "before_cursor_execute")
    def remember(_c: object, _cur: object, statement: str, *_: object) -> None:
        statements.append(statement)

    with engine.begin() as connection:
        append(connection, *[Event("order", str(n), "order.placed", {"n": n}) for n in range(count)])
    assert [row[1] for row in rows(databases)] == [str(n) for n in range(count)]
    assert len(statements) == -(-count // 1000), "one statement for up to a thousand events"
    assert not any("RETURNING" in statement for statement in statements)


def test_nothing_to_append_is_no_statement(databases: Settings, engine: Engine) -> None:
    with engine.begin() as connection:
        append(connection)
    assert rows(databases) == []


def test_a_payload_arrives_as_it_was(databases: Settings, engine: Engine) -> None:
    payload = {"big": 2**63 - 1, "text": "né 'quoted' \\ %s :x", "list": [None, True, 1.5], "nested": {"a": {}}}
    with engine.begin() as connection:
        append(connection, Event("order", "7", "order.placed", payload, schema_version=3, traceparent="00-a-b-01"))
    assert rows(databases) == [("order", "7", "order.placed", 3, payload, "00-a-b-01")]
    assert (
        query(databases, "SELECT payload::text FROM outbox")[0][0]
        == query(databases, "SELECT %s::jsonb::text", parameters=[json.dumps(payload)])[0][0]
    )


def test_a_payload_that_is_no_json_is_refused(databases: Settings, engine: Engine) -> None:
    with engine.begin() as connection, pytest.raises(StatementError, match="not JSON serializable"):
        append(connection, Event("order", "7", "order.placed", {"when": object()}))
    assert rows(databases) == []


def test_a_payload_that_would_not_fit_into_a_record_is_refused(databases: Settings, engine: Engine) -> None:
    with engine.connect() as connection, pytest.raises(IntegrityError, match="payload_fits_a_record"):
        append(connection, Event("order", "7", "order.placed", {"text": "x" * 1_000_000}))
    assert rows(databases) == []


def test_the_database_gives_each_event_an_id_in_order_of_time_and_utc(databases: Settings, engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("SET LOCAL timezone = 'Asia/Tokyo'"))
        append(connection, *[Event("order", "7", "order.placed", {}) for _ in range(3)])
    found = query(
        databases,
        """SELECT uuid_extract_version(id), abs(extract(epoch FROM occurred_at - (now() AT TIME ZONE 'utc'))) < 60,
                  abs(extract(epoch FROM uuid_extract_timestamp(id) - now())) < 60
             FROM outbox""",
    )
    assert found == [(7, True, True)] * 3
