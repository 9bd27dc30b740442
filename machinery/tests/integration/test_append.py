"""append: events are in the outbox if and only if the caller's transaction is committed, in whichever way it is one."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from decimal import Decimal
from typing import Any

import psycopg
import psycopg2
import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from outbox import aio, dbapi
from outbox.base.settings import Settings, SourceRole
from outbox.events.values import parse_json
from outbox.writing.append import append
from outbox.writing.event import Event, rows
from outbox_lab.testing.failures import raises
from outbox_lab.testing.helpers import query
from tests.transactions import WAYS, Way, django_connection, url

KEY = "01a1fc75-167d-7239-af57-d1ee1a62e0a6"


def placed(version: int = 1, schema_version: int = 1, traceparent: str | None = None, **more: Any) -> Event:
    """An event of the fixture domain; its schemas allow further properties."""
    payload = {
        "order_id": KEY,
        "item_id": "6f1f3c6e-0f53-4d0b-9b0e-0d2c6a3a7c11",
        "quantity": 2,
        "version": version,
        "occurred_at": "2026-11-21T10:00:00.123456Z",
        **more,
    }
    return Event("order", KEY, "placed", payload, schema_version, traceparent)


EVENT = placed()
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@pytest.fixture
def databases(shared_databases: Settings) -> Settings:
    """The module's databases, emptied: a pair for each test would cost a second."""
    query(shared_databases, "TRUNCATE outbox, items")
    return shared_databases


def stored_rows(settings: Settings) -> list[tuple[Any, ...]]:
    columns = "aggregatetype, aggregateid, type, schema_version, payload, traceparent"
    return query(settings, f"SELECT {columns} FROM outbox ORDER BY id")


def items(settings: Settings) -> list[tuple[Any, ...]]:
    return query(settings, "SELECT id::text FROM items")


@every_way
def test_change_and_events_appear_when_the_caller_commits(databases: Settings, way: Way) -> None:
    item_id = uuid.uuid4()
    event = placed(
        schema_version=2,
        traceparent="00-a-b-01",
        unit="KGM",
        big=2**63 - 1,
        bigger=10**30,
        text="né 'quoted' \"twice\" \\ %s %(x)s %% :x {} ?",
        list=[None, True, 1.5],
        nested={"a": {}},
    )
    with way(databases) as transaction:
        transaction.change(item_id)
        transaction.append(event)
        assert stored_rows(databases) == []
    assert items(databases) == [(str(item_id),)]
    assert stored_rows(databases) == [("order", KEY, "placed", 2, event.payload, "00-a-b-01")]
    written = query(
        databases, "SELECT payload::text = %s::jsonb::text FROM outbox", parameters=[json.dumps(event.payload)]
    )
    assert written == [(True,)]


@every_way
def test_change_and_events_go_with_a_rollback(databases: Settings, way: Way) -> None:
    def fail_at_the_end() -> None:
        with way(databases) as transaction:
            transaction.change(uuid.uuid4())
            transaction.append(EVENT)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_at_the_end()
    assert items(databases) == []
    assert stored_rows(databases) == []


@every_way
def test_any_number_of_events_is_inserted_in_order(databases: Settings, way: Way) -> None:
    with way(databases) as transaction:
        transaction.append(*[placed(version=number) for number in range(1, 1501)])
    assert [row[4]["version"] for row in stored_rows(databases)] == [*range(1, 1501)]


@pytest.mark.parametrize("way", ["core, psycopg2", "psycopg2"])
def test_a_thousand_events_are_one_statement(databases: Settings, way: str) -> None:
    with WAYS[way](databases) as transaction:
        transaction.append(*[EVENT] * 1500)
    assert query(databases, "SELECT count(DISTINCT cmin::text) FROM outbox") == [(2,)]


@every_way
def test_one_refused_event_writes_none(databases: Settings, way: Way) -> None:
    with way(databases) as transaction:
        transaction.change(uuid.uuid4())
        with raises("event-invalid"):
            transaction.append(EVENT, placed(quantity=0))
    assert len(items(databases)) == 1, "the transaction goes on"
    assert stored_rows(databases) == []


@every_way
def test_a_payload_that_would_not_fit_into_a_record_is_refused(databases: Settings, way: Way) -> None:
    with pytest.raises(Exception, match="payload_fits_a_record") as refused, way(databases) as transaction:
        transaction.append(placed(text="x" * 1_000_000))
    assert "IntegrityError" in {kind.__name__ for kind in type(refused.value).__mro__}
    assert stored_rows(databases) == []


NUMBERS = [2**70, -1, 0.1, 1e22, 5e-90, -0.0, Decimal("1E+5"), Decimal("-0.00"), Decimal("1.10"), Decimal(10) ** 99]
# As long as a number may be, of which Postgres writes out the exponent.
NUMBERS += [Decimal(f"-0.{'1' * (997 - 90)}E-90"), Decimal(f"1.{'1' * 950}E+100")]
TEXTS = ["", "\\u0000", "\U0001f600", "\x7f\t\n", "</script>", "'", "\u2028", "x" * 10_000]


@pytest.mark.parametrize("value", [*NUMBERS, *TEXTS, {"": {"a": NUMBERS}}, {1: 2}, [[[]]] * 3, uuid.UUID(int=7)])
def test_a_sink_reads_what_was_validated(databases: Settings, engine: Engine, value: object) -> None:
    event = placed(value=value)
    (row,) = rows([event])
    with engine.begin() as connection:
        append(connection, event)
    [(stored,)] = query(databases, "SELECT payload::text FROM outbox")
    validated, read = parse_json(row["payload"].encode()), parse_json(stored.encode())
    assert read == validated
    assert read[1] is None


@every_way
def test_events_go_to_our_outbox_whatever_the_search_path_finds_first(other_outbox: Settings, way: Way) -> None:
    query(other_outbox, "TRUNCATE public.outbox")
    with way(other_outbox) as transaction:
        transaction.append(EVENT)
    assert query(other_outbox, "SELECT aggregateid FROM public.outbox") == [(KEY,)]
    assert query(other_outbox, "SELECT aggregateid FROM app.outbox") == []


@pytest.fixture(scope="module")
def other_outbox(fresh_databases: Callable[[], AbstractContextManager[Settings]]) -> Iterator[Settings]:
    """Databases with an outbox of the service's own, which its search path finds before ours."""
    with fresh_databases() as settings:
        query(settings, "CREATE SCHEMA app")
        query(settings, "CREATE TABLE app.outbox (LIKE public.outbox INCLUDING DEFAULTS)")
        app = settings.role_name(SourceRole.APP)
        query(settings, f"GRANT USAGE ON SCHEMA app TO {app}; GRANT ALL ON app.outbox TO {app}")
        query(settings, f"ALTER DATABASE {settings.source_db_url.name} SET search_path = app, public")
        yield settings


def test_a_connection_in_autocommit_mode_is_refused(databases: Settings) -> None:
    """In autocommit mode the events would be committed without the change."""
    options: dict[str, Any] = {"isolation_level": "AUTOCOMMIT", "poolclass": NullPool}
    code, part = "not-in-a-transaction", "autocommit"
    for name in ("psycopg2", "psycopg"):
        with create_engine(url(name, databases), **options).connect() as connection, raises(code, part):
            append(connection, EVENT)

    async def run() -> None:
        for name in ("asyncpg", "psycopg"):
            async with create_async_engine(url(name, databases), **options).connect() as in_asyncio:
                with raises(code, part):
                    await aio.append(in_asyncio, EVENT)

    asyncio.run(run())
    drivers: tuple[Any, ...] = (psycopg2, psycopg)
    for driver in drivers:
        with closing(driver.connect(**databases.dsn(SourceRole.APP))) as of_driver:
            of_driver.autocommit = True
            with raises(code, part):
                dbapi.append(of_driver, EVENT)
            dbapi.append(of_driver)  # nothing would be committed
    with django_connection(databases) as of_django, raises(code, part):
        dbapi.append(of_django, EVENT)
    assert stored_rows(databases) == []


@pytest.mark.parametrize("is_committed", [True, False])
def test_a_transaction_in_autocommit_mode_is_one(databases: Settings, is_committed: bool) -> None:
    """`BEGIN` was sent, by psycopg 3's `transaction()` or by hand."""
    with closing(psycopg.connect(**databases.dsn(SourceRole.APP), autocommit=True)) as connection:  # type: ignore[arg-type]
        with connection.transaction(force_rollback=not is_committed):
            dbapi.append(connection, EVENT)
        with raises("not-in-a-transaction"):
            dbapi.append(connection, EVENT)
    with closing(psycopg2.connect(**databases.dsn(SourceRole.APP))) as by_hand:  # type: ignore[call-overload]
        by_hand.autocommit = True
        by_hand.cursor().execute("BEGIN")
        dbapi.append(by_hand, EVENT)
        by_hand.cursor().execute("COMMIT" if is_committed else "ROLLBACK")
    assert len(stored_rows(databases)) == (2 if is_committed else 0)


def test_an_asyncio_connection_itself_is_refused(databases: Settings) -> None:
    """Nobody would await the insert: the event would be lost without a word."""

    async def run() -> None:
        engine = create_async_engine(url("psycopg", databases), poolclass=NullPool)
        async with engine.begin() as connection:
            with pytest.raises(TypeError, match="run_sync"):
                append(connection, EVENT)  # type: ignore[arg-type]
        async with await psycopg.AsyncConnection.connect(**databases.dsn(SourceRole.APP)) as plain:  # type: ignore[arg-type]
            with pytest.raises(TypeError, match="for asyncio"):
                dbapi.append(plain, EVENT)
            with pytest.raises(TypeError, match="AsyncConnection"):
                await aio.append(plain, EVENT)  # type: ignore[arg-type]

    asyncio.run(run())
    assert stored_rows(databases) == []
