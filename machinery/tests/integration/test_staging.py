"""Large batches, which executors have staged: what is left by tasks that failed, that hang, or that come too late."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from random import Random

import psycopg2
import pytest
from psycopg2 import extensions, sql
from psycopg2.extensions import make_dsn
from structlog.testing import capture_logs

from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole
from outbox.base.wait import wait_for
from outbox.sink.batch import Batch
from outbox.sink.records import Records
from outbox.sink.writer import Copier, Counts, SinkWriter
from tests.support.made_events import DECODER, TOPIC, TRACE, Event, as_read, batch, nth_key, rows, sums, uuid7
from tests.support.record_corpus import HEADERS, record
from tests.support.sink_driver import Database, open_sink

RANDOM = Random(5)  # noqa: S311
TIMEOUT_S = 30


def events(count: int) -> list[Event]:
    return [Event(uuid7(RANDOM), nth_key(number % 3), 3**number, version=number + 1) for number in range(count)]


def copier(settings: Settings, sink: SinkWriter) -> Copier:
    """What the sink's tasks run."""
    assert sink.staging is not None
    return sink.staging.copier(settings.dsn(SinkRole.WRITER), TOPIC)


def read(some: Sequence[Event]) -> Sequence[Records]:
    """The events as a task reads them."""
    return [as_read(*(one.record for one in some), partition=0)]


def staged(settings: Settings, sink: SinkWriter, some: Sequence[Event], attempt: int = 1, start: int = 0) -> Batch:
    """A batch that one task has staged."""
    return replace(batch(some, start), rows=rows([]), staged=copier(settings, sink)(attempt, read(some)))


@contextmanager
def hanging_task(settings: Settings, sink: SinkWriter, database: Database) -> Iterator[None]:
    """A task that has staged some of its events and stands still until the end of the block. Then it goes on, and must
    fail."""
    goes_on, failed = threading.Event(), list[Exception]()

    def parts() -> Iterator[Records]:
        yield from read(events(2) * DECODER.at_once)  # fewer would wait for more of them
        goes_on.wait(TIMEOUT_S)
        yield from read(events(2))

    def run() -> None:
        try:
            copier(settings, sink)(9, parts())
        except psycopg2.Error as error:
            failed.append(error)

    task = threading.Thread(target=run)
    task.start()
    locked = "SELECT FROM pg_locks JOIN pg_class ON relation = pg_class.oid WHERE relname LIKE '%/rows'"
    wait_for("the task to hold its lock", lambda: database.query(locked), timeout_s=TIMEOUT_S)
    try:
        yield
    finally:
        goes_on.set()
        task.join(TIMEOUT_S)
    assert not task.is_alive()
    assert failed, "its rows are with us"


def test_only_what_successful_tasks_have_staged_is_applied(databases: Settings, database: Database) -> None:
    some, other = events(6), events(4)
    with open_sink(databases) as sink:
        copier(databases, sink)(1, read(some))  # its executor was lost before it could tell
        copier(databases, sink)(3, read(other))  # as it was speculative, another was faster
        assert sink.apply(staged(databases, sink, some, attempt=2)) == Counts(rows=6, applied=6)
        sink.clear()
        assert database.query('SELECT count(*) FROM staging."dedup/1/1/rows"') == [(0,)]
        assert sink.apply(staged(databases, sink, other, start=6)) == Counts(rows=4, applied=4)
        sink.close()
    assert database.totals() == sums([*some, *other])
    assert database.staging_tables() == []


def test_hanging_task_delays_neither_the_next_batch_nor_the_end(databases: Settings, database: Database) -> None:
    some = events(6)
    with open_sink(databases) as sink:
        with hanging_task(databases, sink, database):
            assert sink.apply(staged(databases, sink, some[:3])).applied == 3
            sink.clear()
            assert sink.apply(staged(databases, sink, some[3:], start=3)).applied == 3
            sink.clear()
        with hanging_task(databases, sink, database):
            sink.close()
    assert database.totals() == sums(some)
    assert database.staging_tables() == []


def test_a_task_of_an_earlier_driver_neither_blocks_nor_writes(databases: Settings, database: Database) -> None:
    some = events(6)
    with open_sink(databases) as sink:
        late = copier(databases, sink)
        with hanging_task(databases, sink, database):
            sink._connection.close()  # the driver is gone, its executor is not
            with open_sink(databases) as next_sink:
                assert next_sink.apply(staged(databases, next_sink, some)).applied == 6
                with pytest.raises(psycopg2.errors.UndefinedTable):
                    late(1, read(events(3)))
                next_sink.close()
    assert database.totals() == sums(some)
    assert database.staging_tables() == []


def test_sessions_that_are_no_tasks_of_the_sink_live_on(databases: Settings, database: Database) -> None:
    dsn = databases.dsn(SinkRole.WRITER)
    names = ("dedup", "dedup/psql", "naive/1", "dedup/999")
    others = [psycopg2.connect(make_dsn(None, **dsn, application_name=name)) for name in names]
    with open_sink(databases) as sink:
        sink.apply(staged(databases, sink, events(2)))
        sink.close()
    for other in others:
        with closing(other), other.cursor() as cursor:
            cursor.execute("SELECT")


def test_a_session_that_reads_as_pg_dump_does_holds_up_nothing(databases: Settings, database: Database) -> None:
    some = events(9)
    with closing(connect(databases, SinkRole.WRITER)) as dumping, dumping.cursor() as cursor:
        with open_sink(databases) as sink:
            cursor.execute("""LOCK TABLE staging."dedup/1/1/rows" IN ACCESS SHARE MODE""")
            assert sink.apply(staged(databases, sink, some[:3])).applied == 3
            sink.clear()
            assert sink.apply(staged(databases, sink, some[3:6], attempt=2, start=3)).applied == 3
            sink.clear()
            sink.close()
        with open_sink(databases) as sink:
            assert {*database.staging_tables()} == {"dedup/1/1/rows", "dedup/2/1/rows", "dedup/2/1/dead"}
            dumping.rollback()
            assert sink.apply(staged(databases, sink, some[6:], start=6)).applied == 3
            sink.clear()
            assert {*database.staging_tables()} == {"dedup/2/1/rows", "dedup/2/1/dead"}
            sink.close()
    assert database.totals() == sums(some)
    assert database.staging_tables() == []


def test_staging_does_not_grow_while_sessions_hold_its_tables(databases: Settings, database: Database) -> None:
    """Each session leaves one batch behind, in the pair of tables that was there when it came."""
    some = events(24)
    with ExitStack() as dumping, open_sink(databases) as sink:
        for number in range(8):
            batch_of_three = some[3 * number : 3 * number + 3]
            done = staged(databases, sink, batch_of_three, attempt=number, start=3 * number)
            if number in (1, 4):
                session = dumping.enter_context(closing(connect(databases, SinkRole.WRITER)))
                lock_all(session, database.staging_tables())
            assert sink.apply(done).applied == 3
            assert [rows for rows in staged_rows(database) if rows] == [3] * (1 + (number > 1) + (number > 4))
            sink.clear()
        assert len(database.staging_tables()) == 2 * 3
        dumping.close()
        sink.close()
    assert database.totals() == sums(some)
    assert database.staging_tables() == []


def lock_all(session: extensions.connection, tables: Sequence[str]) -> None:
    """Lock the tables as pg_dump does."""
    names = sql.SQL(", ").join(sql.Identifier("staging", name) for name in tables)
    with session.cursor() as cursor:
        cursor.execute(sql.SQL("LOCK TABLE {} IN ACCESS SHARE MODE").format(names))


def staged_rows(database: Database) -> list[int]:
    """How many rows each staging table has."""
    tables = [name for name in database.staging_tables() if name.endswith("/rows")]
    return [int(str(database.query(f'SELECT count(*) FROM staging."{name}"')[0][0])) for name in tables]


def test_a_traced_record_that_is_no_event_is_set_aside(databases: Settings) -> None:
    traced = HEADERS | {"traceparent": f"00-{TRACE}-0123456789abcdef-01"}
    records = as_read(record(b"bad", traced), partition=0)
    with open_sink(databases) as sink, capture_logs() as lines:
        done = copier(databases, sink)(1, [records])
        sink.apply(replace(batch([], 0, 1), staged=done, traced=done.traced))
        sink.close()
    assert [(line["offset"], line["outcome"]) for line in lines] == [(0, "set aside")]
