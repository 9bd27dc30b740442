"""The sink `lakehouse`, with real Spark and Delta: what its table holds, read without Spark, whatever comes twice."""

from __future__ import annotations

import fcntl
import importlib.util
import threading
import uuid
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

import duckdb
import psycopg2
import pytest
from confluent_kafka import Producer
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from outbox.audit import declared, sinks
from outbox.audit.store import Store
from outbox.base.database import connect, query
from outbox.base.settings import Settings, SinkRole, load
from outbox.base.wait import wait_for
from outbox.events.schema import Column, Rejection
from outbox.kafka.clients import client_config
from outbox.sink import discovery
from outbox.sink.applying.lakehouse import spark_table, table
from outbox.sink.applying.lakehouse.target import LakehouseTarget
from outbox.sink.decoding.decoder import DecodedEvent, RecordDecoder, Skipped
from outbox.sink.decoding.records import DeadRecord, Record
from outbox.sink.decoding.values import day_of
from outbox.sink.remembering import fence
from outbox.sink.repair import replay
from outbox.sink.repair.replay import Chosen, Replayed, Selection
from outbox.sink.spec import SinkJob, SinkSpec, TargetState
from outbox.sink.writer import Counts, SinkWriter
from outbox_lab.testing.failures import raises
from outbox_lab.testing.fixtures.spark import leaves_sockets
from tests.lake import NAME, SCHEMA, TOTALS, driven, events, folder, ids
from tests.support import transformed
from tests.support.made_events import NOW_MS, TOPIC, TOPIC_ID, Event, batch, fetch, sums
from tests.support.record_corpus import record, unread
from tests.support.sink_driver import Database
from tests.support.topic_reader import topic_of

pytestmark = leaves_sockets
DECLARED = discovery.sinks(load(environment=False))[NAME]
RANDOM = Random(31)  # noqa: S311
DAY_MS = 24 * 60 * 60 * 1000
TIMEOUT_S = 180
# Several times the heap of the driver.
LARGE_RECORDS, LARGE_BYTES = 1_000, 900_000
PRODUCED_AT_ONCE = 50  # of them, which wait for the broker in memory


@pytest.fixture
def lake(databases: Settings, lakehouse_spark: SparkSession, tmp_path: Path) -> Settings:
    """Settings with databases and a folder of tables of this test alone."""
    return databases.replace(sink_storage=f"file://{tmp_path}/it's a lake")


def driving(settings: Settings, spec: SinkSpec = DECLARED) -> AbstractContextManager[SinkWriter]:
    return driven(settings, spec)


def read_table(settings: Settings) -> TargetState:
    """The table as `outbox check` reads it."""
    return table.read(settings, NAME, TOTALS)


def totals(settings: Settings) -> dict[str, int]:
    return {key: int(total) for key, total, _ in read_table(settings).totals}


def state(settings: Settings) -> sinks.SinkState:
    """The sink as `outbox check` reads it."""
    with closing(Store()) as store:
        [found] = sinks.read(settings, declared.load(settings), store).states
        return found


def database(settings: Settings) -> Database:
    return Database(settings, NAME)


def run_replay(settings: Settings, *some: Event) -> Replayed:
    """Replay the dead letters of these events."""
    return run_chosen(settings, [Chosen(NAME, TOPIC, TOPIC_ID, event.event_id) for event in some])


def run_chosen(settings: Settings, chosen: Sequence[Chosen]) -> Replayed:
    """Replay these dead letters."""
    applier_of = lambda one: one.target.applier(settings, one)  # noqa: E731
    with closing(connect(settings, SinkRole.WRITER)) as connection:
        done = replay.replay(connection, {NAME: DECLARED}, chosen, applier_of=applier_of)
    return done.get(NAME, Replayed())


def test_each_event_is_in_the_table_once_however_often_it_comes(lake: Settings) -> None:
    new, old = events(4), events(2, at_ms=NOW_MS - 800 * DAY_MS)
    with driving(lake) as sink:
        assert sink.apply(batch([*new[:2], *old, new[0]])) == Counts(rows=5, applied=4, duplicates=1)
        assert sink.apply(batch(new[:2], start=0)) == Counts(rows=2, duplicates=2), "read again"
        assert sink.apply(batch([*new, *old], start=5)) == Counts(rows=6, applied=2, duplicates=4), "sent again"
        with raises("sink-has-driver"), driving(lake):
            pass
    with driving(lake) as sink:
        assert sink.apply(batch([*old, *new], start=11)) == Counts(rows=6, duplicates=6), "after a restart"
        with raises("events-lost", f"offsets 17 to 19 of topic {TOPIC}, partition 0"):
            sink.apply(batch(events(1), start=20))
    assert ids(lake) == sorted(event.event_id for event in [*new, *old])
    assert totals(lake) == sums([*new, *old])
    assert {path.name for path in folder(lake).glob("outbox_day=*")} == {
        f"outbox_day={day_of(uuid.UUID(event.event_id))}" for event in (new[0], old[0])
    }
    # All that the last commit says, although it has nothing new: how far the table is.
    assert read_table(lake).positions == {TOPIC: {0: 17}} == {TOPIC: database(lake).positions()}


class Notes(RecordDecoder):
    """A decoder of events with a text of any length."""

    types = MappingProxyType({"note": [Column("page", "bigint", is_nullable=False), Column("note", "text", False)]})
    key = "page"

    def record(self, record: Record) -> DecodedEvent | Rejection | Skipped:
        return DecodedEvent(str(self.event_id(record)), (1, (record.value or b"").decode()), "note")


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # pytest would keep each, and with it a DataFrame
def test_more_records_than_the_heap_has_room_for_are_merged(
    topic: Settings, lakehouse_spark: SparkSession, tmp_path: Path
) -> None:
    lake, name = topic.replace(sink_storage=f"file://{tmp_path}/lake"), topic_of(topic)
    schema = tmp_path / "notes.sql"
    schema.write_text(
        "CREATE TABLE IF NOT EXISTS events (event_id STRING, outbox_day DATE, partition INT, offset BIGINT,"
        " page BIGINT, note STRING)"
        " USING delta PARTITIONED BY (outbox_day) LOCATION %(location)s"
    )
    target, merge = LakehouseTarget(schema, TOTALS), DECLARED.job.strategy
    notes = discovery.resolve(lake, SinkJob("notes", TOTALS.parent, target, strategy=merge, decoders={name: Notes()}))
    heap = int(lakehouse_spark.sparkContext._jvm.java.lang.Runtime.getRuntime().maxMemory())  # type: ignore[union-attr]
    assert heap < LARGE_RECORDS * LARGE_BYTES

    long = (RANDOM.randbytes(8 << 10).hex() * 60)[:LARGE_BYTES]  # so that the broker's disk gets little of it
    producer = Producer({**client_config(topic), "compression.type": "lz4"})
    for number in range(LARGE_RECORDS):
        (event,) = events(1, at_ms=NOW_MS + number)  # in the order of their ids, so that a MERGE reads few files
        while len(producer) >= PRODUCED_AT_ONCE:
            producer.poll(0.1)
        one = event.record
        value = f"{event.event_id} {long}".encode()
        producer.produce(name, value, one.key, partition=0, headers=list(one.headers))
    assert producer.flush(TIMEOUT_S) == 0

    assert transformed.run(lake, lakehouse_spark, notes) == Counts(LARGE_RECORDS, LARGE_RECORDS)


def test_spark_and_duckdb_read_the_totals(lake: Settings, lakehouse_spark: SparkSession) -> None:
    some = events(9)
    with driving(lake) as sink:
        sink.apply(batch([*some, *some]))
    query = TOTALS.read_text()
    delta = DeltaTable(folder(lake))
    protocol = delta.protocol()
    assert (protocol.min_reader_version, protocol.reader_features) == (1, None), "nothing that a reader must know of"
    lakehouse_spark.read.format("delta").load(table.location(lake, NAME)).createOrReplaceTempView("events")
    assert {row["key"]: int(row["total"]) for row in lakehouse_spark.sql(query).collect()} == sums(some)
    with duckdb.connect() as connection:
        connection.register("events", delta.to_pyarrow_dataset())
        found = connection.sql(query).fetchall()
    assert {key: int(total) for key, _, total, *_ in found} == sums(some)


def test_a_batch_is_looked_for_among_its_own_days_only(lake: Settings) -> None:
    today, before = events(3), events(3, at_ms=NOW_MS - 3 * DAY_MS)
    with driving(lake) as sink:
        sink.apply(batch([*before, *today]))
        for file in folder(lake).glob(f"outbox_day={day_of(uuid.UUID(before[0].event_id))}/*.parquet"):
            file.unlink()
        assert sink.apply(batch([*today, *events(1)], start=6)) == Counts(rows=4, applied=1, duplicates=3)
        with raises("table-failed"):
            sink.apply(batch(before, start=10))


IDLE = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in%'"


def require_locked(settings: Settings) -> None:
    """A repair of the sink waits for its lock."""
    with closing(connect(settings, SinkRole.WRITER)) as repairing, repairing.cursor() as cursor:
        cursor.execute("SET lock_timeout = '200ms'")
        with pytest.raises(psycopg2.errors.LockNotAvailable):
            fence.lock(cursor, NAME)


def test_letters_come_before_the_table_and_positions_after_it(lake: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    some, bad = events(2), events(1)[0]
    made = batch(some, dead=[unread(bad, 2)])
    counts: list[Counts] = []
    with driving(lake) as sink:
        with Path(f"{folder(lake)}.lock").open("w") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)  # as another process that writes to the table
            apply = threading.Thread(target=lambda: counts.append(sink.apply(made)))
            apply.start()
            wait_for("the letter", lambda: database(lake).dead_letters(), timeout_s=TIMEOUT_S)
            assert database(lake).positions() == {}
            require_locked(lake)
            assert database(lake).query(IDLE) == [(0,)], "a transaction is open while the table is written"
            assert ids(lake) == []
        apply.join(TIMEOUT_S)
        assert counts == [Counts(rows=2, applied=2, dead=1)]
        assert database(lake).positions() == {0: 3}

        with Path(f"{folder(lake)}.lock").open("w") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)
            monkeypatch.setattr(spark_table, "LOCK_TIMEOUT_S", 0.2)
            with raises("table-locked"):
                sink.apply(batch(events(1), start=3))
    assert database(lake).positions() == {0: 3}
    assert ids(lake) == sorted(event.event_id for event in some)


def test_letters_are_replayed_into_the_table_each_once(lake: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other, given_up = events(3)
    with driving(lake) as sink:
        sink.apply(batch(events(1), dead=[unread(one, 1), unread(other, 2), unread(given_up, 3)]))
        database(lake).discard(Selection(identities=[given_up.event_id]))
        before = read_table(lake)
        assert run_replay(lake, one) == Replayed(applied=1)
        assert run_replay(lake, one, other) == Replayed(applied=1)
        assert run_replay(lake, one, other) == Replayed()
        # As after a crash between the MERGE and the letter's commit.
        query(lake, SinkRole.WRITER, "UPDATE dead_letters SET status = 'open' WHERE identity = %s", [one.event_id])
        assert before.lacking is not None
        assert before.lacking([one.event_id, other.event_id]) == {one.event_id, other.event_id}, "the version of then"
        assert not {one.event_id, other.event_id} & state(lake).letters.keys(), "they are open or replayed, and there"
        with monkeypatch.context() as patch:
            find = importlib.util.find_spec
            patch.setattr(importlib.util, "find_spec", lambda name: None if name == "deltalake" else find(name))
            assert state(lake).not_compared == table.UNREAD.format("deltalake")
            letters = {event_id: letter.is_open for event_id, letter in state(lake).letters.items()}
            assert letters == {one.event_id: True, given_up.event_id: False}, "only open ones are set aside"
        assert run_replay(lake, one) == Replayed(duplicates=1)
        assert read_table(lake).positions == {TOPIC: {0: 4}}, "a replay says nothing of positions, and hides none"
        assert sink.apply(batch([one, other, given_up], start=4)).duplicates == 3
    stored = {row["event_id"]: row for row in DeltaTable(folder(lake)).to_pyarrow_table().to_pylist()}
    assert given_up.event_id not in stored
    assert (stored[one.event_id]["quantity"], stored[one.event_id]["version"]) == (one.quantity, one.version)


def test_no_transaction_is_open_while_a_replay_writes_the_table(
    lake: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = events(2)
    merge = spark_table.Table.merge

    def looked_at(*arguments: Any) -> int:
        assert database(lake).query(IDLE) == [(0,)]
        require_locked(lake)
        return merge(*arguments)

    with driving(lake) as sink:
        sink.apply(batch([], dead=[unread(one, 0), unread(other, 1)]))
        monkeypatch.setattr(spark_table.Table, "merge", looked_at)
        assert run_replay(lake, one) == Replayed(applied=1)
        monkeypatch.undo()
        assert sink.apply(batch(events(1), start=2)).applied == 1, "the lock is free again"
    assert database(lake).statuses() == {one.event_id: "replayed", other.event_id: "open"}


def test_a_restored_table_gets_replayed_events_again(lake: Settings, lakehouse_spark: SparkSession) -> None:
    first, replayed, given_up = events(3)
    with driving(lake) as sink:
        sink.apply(batch([first], dead=[unread(replayed, 1), unread(given_up, 2)]))
        before = DeltaTable(folder(lake)).version()
        database(lake).discard(Selection(identities=[given_up.event_id]))
        assert run_replay(lake, replayed) == Replayed(applied=1)
        lakehouse_spark.sql(f"RESTORE TABLE delta.`{table.location(lake, NAME)}` TO VERSION AS OF {before}")
        assert ids(lake) == [first.event_id]
        # As after a rewind; the records are valid by now.
        sink.apply(batch([first, replayed, given_up]))
    assert ids(lake) == sorted([first.event_id, replayed.event_id])


def test_a_replay_brings_back_what_a_restored_table_has_lost(lake: Settings) -> None:
    kept, lost, came = events(3)
    malformed = DeadRecord(0, 2, record(b"{"), came.event_id, Rejection("malformed", ""))

    def again() -> Replayed:
        with closing(connect(lake, SinkRole.WRITER)) as connection:
            chosen = Selection(sink=NAME, elsewhere=[NAME]).choose(connection)
        return run_chosen(lake, chosen)

    with driving(lake) as sink:
        sink.apply(batch([], dead=[unread(kept, 0), unread(lost, 1), malformed]))
        assert run_replay(lake, kept) == Replayed(applied=1)
        before = DeltaTable(folder(lake)).version()
        assert run_replay(lake, lost) == Replayed(applied=1)
        assert sink.apply(batch([came], start=3)).applied == 1
    assert {*database(lake).statuses().values()} == {"replayed"}
    assert again() == Replayed()
    DeltaTable(folder(lake)).restore(before)
    assert {*state(lake).letters} == {one.event_id for one in (lost, came)}, "`check` says so"
    assert again() == Replayed(applied=1, rejected=1)
    assert ids(lake) == sorted([kept.event_id, lost.event_id])
    assert database(lake).statuses()[came.event_id] == "open", "its letter keeps another record"


def test_a_table_that_is_gone_or_another_is_told(lake: Settings, tmp_path: Path) -> None:
    with driving(lake) as sink:
        sink.apply(batch(events(1)))
    moved = tmp_path / "moved"
    folder(lake).rename(moved)
    for _ in range(2):
        with raises("table-missing"), driving(lake):
            pass
    with closing(connect(lake, SinkRole.WRITER)) as connection:
        sink = DECLARED.target.writer(lake, connection, DECLARED, fetch)
        with raises("table-missing"):
            sink.positions("a topic that was added", TOPIC_ID)
    moved.rename(folder(lake))
    wider = tmp_path / "table.sql"
    wider.write_text(SCHEMA.read_text().replace("unit        STRING", "note STRING, unit STRING"))
    other = replace(DECLARED, target=LakehouseTarget(wider, TOTALS))
    with raises("table-failed", "schema does not match"), driving(lake, other):
        pass


def test_a_table_whose_making_was_interrupted_is_made(lake: Settings) -> None:
    log = folder(lake) / "_delta_log"
    log.mkdir(parents=True)
    (log / f".{'0' * 20}.json.{uuid.uuid4()}.tmp").write_text("{}")
    (one,) = events(1)
    with driving(lake) as sink:
        assert sink.apply(batch([one])).applied == 1
    assert ids(lake) == [one.event_id]
