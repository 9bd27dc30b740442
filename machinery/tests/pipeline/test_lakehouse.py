"""The sink `lakehouse`, with real Spark and Delta: what its table holds, read without Spark, whatever comes twice; and
with a transform before the table: what is left out or set aside, and what survives a kill.
"""

from __future__ import annotations

import fcntl
import signal
import threading
import uuid
from contextlib import closing
from dataclasses import replace
from decimal import Decimal
from functools import partial
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

from outbox.audit import check, declared, sinks
from outbox.audit.report import Report
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
from outbox.sink.repair.replay import Replayed, Selection
from outbox.sink.spark import reader
from outbox.sink.spec import SinkJob, TargetState
from outbox.sink.writer import Counts
from outbox_lab.testing.failures import raises
from outbox_lab.testing.fixtures.spark import leaves_sockets
from tests.lake import NAME, SCHEMA, TOTALS, driven, events, folder, ids, write_source
from tests.support import transformed
from tests.support.made_events import NOW_MS, TOPIC, TOPIC_ID, Event, batch, fetch, sums
from tests.support.record_corpus import record, unread
from tests.support.sink_driver import Database, replayed
from tests.support.sink_process import Publisher, catch_up_faulty
from tests.support.topic_reader import topic_of
from tests.transforms import GRAMS, LEFT_OUT

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


def read_table(settings: Settings) -> TargetState:
    """The table as `outbox check` reads it."""
    return table.read(settings, NAME, TOTALS)


def state(settings: Settings) -> sinks.SinkState:
    """The sink as `outbox check` reads it."""
    with closing(Store()) as store:
        [found] = sinks.read(settings, declared.load(settings), store).states
        return found


def replay(settings: Settings, *some: Event) -> Replayed:
    """Replay the open letters of these events."""
    return replayed(settings, DECLARED, Selection(identities=[event.event_id for event in some]))


def test_each_event_is_in_the_table_once_however_often_it_comes(lake: Settings) -> None:
    new, old = events(4), events(2, at_ms=NOW_MS - 800 * DAY_MS)
    with driven(lake, DECLARED) as sink:
        assert sink.apply(batch([*new[:2], *old, new[0]])) == Counts(rows=5, applied=4, duplicates=1)
        assert sink.apply(batch(new[:2], start=0)) == Counts(rows=2, duplicates=2), "read again"
        assert sink.apply(batch([*new, *old], start=5)) == Counts(rows=6, applied=2, duplicates=4), "sent again"
        with raises("sink-has-driver"), driven(lake, DECLARED):
            pass
    with driven(lake, DECLARED) as sink:
        assert sink.apply(batch([*old, *new], start=11)) == Counts(rows=6, duplicates=6), "after a restart"
        with raises("events-lost", f"offsets 17 to 19 of topic {TOPIC}, partition 0"):
            sink.apply(batch(events(1), start=20))
    assert ids(lake) == sorted(event.event_id for event in [*new, *old])
    assert {key: int(total) for key, total, _ in read_table(lake).totals} == sums([*new, *old])
    assert {path.name for path in folder(lake).glob("outbox_day=*")} == {
        f"outbox_day={day_of(uuid.UUID(event.event_id))}" for event in (new[0], old[0])
    }
    # All that the last commit says, although it has nothing new: how far the table is.
    assert read_table(lake).positions == {TOPIC: {0: 17}} == {TOPIC: Database(lake, NAME).positions()}


class Notes(RecordDecoder):
    """A decoder of events with a text of any length."""

    types = MappingProxyType({"note": [Column("page", "bigint", is_nullable=False), Column("note", "text", False)]})
    key = "page"

    def record(self, record: Record) -> DecodedEvent | Rejection | Skipped:
        return DecodedEvent(str(self.event_id(record)), (1, (record.value or b"").decode()), "note")


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # pytest would keep each, and with it a DataFrame
def test_a_batch_larger_than_the_heap_is_merged(topic: Settings, lakehouse_spark: SparkSession, tmp_path: Path) -> None:
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
    with driven(lake, DECLARED) as sink:
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
    with driven(lake, DECLARED) as sink:
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
    with driven(lake, DECLARED) as sink:
        with Path(f"{folder(lake)}.lock").open("w") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)  # as another process that writes to the table
            apply = threading.Thread(target=lambda: counts.append(sink.apply(made)))
            apply.start()
            wait_for("a dead letter of the event", lambda: Database(lake, NAME).dead_letters(), timeout_s=TIMEOUT_S)
            assert Database(lake, NAME).positions() == {}
            require_locked(lake)
            assert Database(lake, NAME).query(IDLE) == [(0,)], "a transaction is open while the table is written"
            assert ids(lake) == []
        apply.join(TIMEOUT_S)
        assert counts == [Counts(rows=2, applied=2, dead=1)]
        assert Database(lake, NAME).positions() == {0: 3}

        with Path(f"{folder(lake)}.lock").open("w") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)
            monkeypatch.setattr(spark_table, "LOCK_TIMEOUT_S", 0.2)
            with raises("table-locked"):
                sink.apply(batch(events(1), start=3))
    assert Database(lake, NAME).positions() == {0: 3}
    assert ids(lake) == sorted(event.event_id for event in some)


def test_letters_are_replayed_into_the_table_each_once(lake: Settings) -> None:
    one, other, given_up = events(3)
    with driven(lake, DECLARED) as sink:
        sink.apply(batch(events(1), dead=[unread(one, 1), unread(other, 2), unread(given_up, 3)]))
        Database(lake, NAME).discard(Selection(identities=[given_up.event_id]))
        before = read_table(lake)
        assert replay(lake, one) == Replayed(applied=1)
        assert replay(lake, one, other) == Replayed(applied=1)
        assert replay(lake, one, other) == Replayed()
        # As after a crash between the MERGE and the letter's commit.
        query(lake, SinkRole.WRITER, "UPDATE dead_letters SET status = 'open' WHERE identity = %s", [one.event_id])
        assert before.lacking is not None
        assert before.lacking([one.event_id, other.event_id]) == {one.event_id, other.event_id}, "the version of then"
        assert not {one.event_id, other.event_id} & state(lake).letters.keys(), "they are open or replayed, and there"
        assert replay(lake, one) == Replayed(duplicates=1)
        assert read_table(lake).positions == {TOPIC: {0: 4}}, "a replay says nothing of positions, and hides none"
        assert sink.apply(batch([one, other, given_up], start=4)).duplicates == 3
    stored = {row["event_id"]: row for row in DeltaTable(folder(lake)).to_pyarrow_table().to_pylist()}
    assert given_up.event_id not in stored
    assert (stored[one.event_id]["quantity"], stored[one.event_id]["version"]) == (one.quantity, one.version)


def test_no_transaction_is_open_during_a_replay_into_the_table(lake: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = events(2)
    merge = spark_table.Table.merge

    def looked_at(*arguments: Any) -> int:
        assert Database(lake, NAME).query(IDLE) == [(0,)]
        require_locked(lake)
        return merge(*arguments)

    with driven(lake, DECLARED) as sink:
        sink.apply(batch([], dead=[unread(one, 0), unread(other, 1)]))
        monkeypatch.setattr(spark_table.Table, "merge", looked_at)
        assert replay(lake, one) == Replayed(applied=1)
        monkeypatch.undo()
        assert sink.apply(batch(events(1), start=2)).applied == 1, "the lock is free again"
    assert Database(lake, NAME).statuses() == {one.event_id: "replayed", other.event_id: "open"}


def test_a_restored_table_gets_replayed_events_again(lake: Settings, lakehouse_spark: SparkSession) -> None:
    first, letter, given_up = events(3)
    with driven(lake, DECLARED) as sink:
        sink.apply(batch([first], dead=[unread(letter, 1), unread(given_up, 2)]))
        before = DeltaTable(folder(lake)).version()
        Database(lake, NAME).discard(Selection(identities=[given_up.event_id]))
        assert replay(lake, letter) == Replayed(applied=1)
        lakehouse_spark.sql(f"RESTORE TABLE delta.`{table.location(lake, NAME)}` TO VERSION AS OF {before}")
        assert ids(lake) == [first.event_id]
        # As after a rewind; the records are valid by now.
        sink.apply(batch([first, letter, given_up]))
    assert ids(lake) == sorted([first.event_id, letter.event_id])


def test_a_replay_brings_back_what_a_restored_table_has_lost(lake: Settings) -> None:
    kept, lost, came = events(3)
    malformed = DeadRecord(0, 2, record(b"{"), came.event_id, Rejection("malformed", ""))
    again = partial(replayed, lake, DECLARED, Selection(elsewhere=[NAME]))
    with driven(lake, DECLARED) as sink:
        sink.apply(batch([], dead=[unread(kept, 0), unread(lost, 1), malformed]))
        assert replay(lake, kept) == Replayed(applied=1)
        before = DeltaTable(folder(lake)).version()
        assert replay(lake, lost) == Replayed(applied=1)
        assert sink.apply(batch([came], start=3)).applied == 1
    assert {*Database(lake, NAME).statuses().values()} == {"replayed"}
    assert again() == Replayed()
    DeltaTable(folder(lake)).restore(before)
    assert {*state(lake).letters} == {one.event_id for one in (lost, came)}, "`check` says so"
    assert again() == Replayed(applied=1, rejected=1)
    assert ids(lake) == sorted([kept.event_id, lost.event_id])
    assert Database(lake, NAME).statuses()[came.event_id] == "open", "its letter keeps another record"


def test_a_table_that_is_gone_or_another_is_told(lake: Settings, tmp_path: Path) -> None:
    with driven(lake, DECLARED) as sink:
        sink.apply(batch(events(1)))
    moved = tmp_path / "moved"
    folder(lake).rename(moved)
    for _ in range(2):
        with raises("table-missing"), driven(lake, DECLARED):
            pass
    with closing(connect(lake, SinkRole.WRITER)) as connection:
        sink = DECLARED.target.writer(lake, connection, DECLARED, fetch)
        with raises("table-missing"):
            sink.positions("a topic that was added", TOPIC_ID)
    moved.rename(folder(lake))
    wider = tmp_path / "table.sql"
    wider.write_text(SCHEMA.read_text().replace("unit        STRING", "note STRING, unit STRING"))
    other = replace(DECLARED, target=LakehouseTarget(wider, TOTALS))
    with raises("table-failed", "schema does not match"), driven(lake, other):
        pass


def test_a_table_whose_making_was_interrupted_is_made(lake: Settings) -> None:
    log = folder(lake) / "_delta_log"
    log.mkdir(parents=True)
    (log / f".{'0' * 20}.json.{uuid.uuid4()}.tmp").write_text("{}")
    (one,) = events(1)
    with driven(lake, DECLARED) as sink:
        assert sink.apply(batch([one])).applied == 1
    assert ids(lake) == [one.event_id]


# A transform before the table ---------------------------------------------------------------------------------------


FEW, MANY = 12, 120  # that the driver reads itself, and that executors read: no more than needed, as each costs queries
TABLE = """
CREATE TABLE IF NOT EXISTS events (
    event_id STRING NOT NULL, outbox_day DATE NOT NULL, partition INT NOT NULL, offset BIGINT NOT NULL,
    event_type STRING NOT NULL, item_id STRING NOT NULL, unit STRING NOT NULL, quantity BIGINT NOT NULL,
    version BIGINT NOT NULL, occurred_at TIMESTAMP NOT NULL, kilograms DECIMAL(38, 3) NOT NULL
) USING delta PARTITIONED BY (outbox_day) LOCATION %(location)s
"""
FAILS_AT = 13  # a quantity


class Sink(transformed.Sink):
    """A sink with a transform and a table."""

    def rows(self) -> dict[str, dict[str, Any]]:
        """Rows of the table by event; each is there once."""
        rows = DeltaTable(folder(self.settings)).to_pyarrow_table().to_pylist()
        found = {row["event_id"]: row for row in rows}
        assert len(found) == len(rows)
        return found

    def check(self, monkeypatch: pytest.MonkeyPatch) -> Report:
        """The report of `outbox check` if this job is the project's only one."""
        monkeypatch.setattr(discovery, "jobs", lambda _: [self.spec.job])
        return check.check(self.settings)


@pytest.fixture
def sink(topic: Settings, lakehouse_spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sink:
    """A sink with the table of the domain."""
    monkeypatch.setattr(reader, "TASK_MIN_RECORDS", 100)  # so that a part has two tasks
    lake = topic.replace(sink_storage=f"file://{tmp_path}/lake")
    return Sink(lake, lakehouse_spark, DECLARED.job, "picky")


@pytest.fixture
def weights(sink: Sink, tmp_path: Path) -> Sink:
    """A sink whose table has other columns than its events."""
    schema = tmp_path / "table.sql"
    schema.write_text(TABLE)
    sink.transform, sink.job = "in_kilograms", replace(DECLARED.job, target=LakehouseTarget(schema, TOTALS))
    return sink


def of_units(publisher: Publisher, count: int) -> list[Event]:
    """Events of both types in three units, one of which is no weight."""
    units = [*GRAMS, "LTR"]
    return [
        replace(event, unit=units[number % 3], quantity=event.quantity * (1 if number % 2 else -1))
        for number, event in enumerate(publisher.events(count))
    ]


def kilograms(event: Event) -> Decimal:
    return event.quantity * GRAMS[event.unit] / Decimal(1000)


def with_left_out(publisher: Publisher, count: int) -> tuple[list[Event], Event, list[Event]]:
    """Events for one of which transforms fail. They leave two of one item out, which together change nothing."""
    events = publisher.events(count)
    for number, quantity in ((count - 5, FAILS_AT), (1, LEFT_OUT), (6, -LEFT_OUT)):
        events[number] = replace(events[number], quantity=quantity)
    assert events[1].key == events[6].key
    return events, events[count - 5], [events[1], events[6]]


@pytest.mark.parametrize(("transform", "count"), [("in_kilograms", FEW), ("in_kilograms_shuffled", MANY)])
def test_a_transformed_event_is_in_the_table_once(
    weights: Sink, publisher: Publisher, count: int, transform: str
) -> None:
    weights.transform = transform
    events = of_units(publisher, count)
    kept = {event.event_id: event for event in events if event.unit in GRAMS}
    again = sum(event.event_id in kept for event in events[:10])
    publisher.send([*events, *events[:10]])
    publisher.send_raw("key", b"no event", None)
    left_out = count + 10 - len(kept) - again
    assert weights.run() == Counts(count + 10, len(kept), duplicates=again, dead=1, filtered=left_out)
    rows = weights.rows()
    assert rows.keys() == kept.keys()
    for event_id, event in kept.items():
        row = rows[event_id]
        assert (row["kilograms"], row["quantity"], row["unit"]) == (kilograms(event), event.quantity, event.unit)
        assert (row["event_type"], row["item_id"], row["version"]) == (event.name, event.key, event.version)
    # The table does not know what is left out.
    assert weights.run(from_start=True) == Counts(count + 10, duplicates=len(kept) + again, dead=1, filtered=left_out)
    assert weights.rows() == rows
    assert weights.database.query("SELECT applied, filtered FROM sinks") == [(len(kept), 2 * left_out)]


# Each kind of a row that breaks a rule is tried with a projection (test_transform): what compares is the same.
@pytest.mark.parametrize(("transform", "code"), [("doubled", "transform-breaks-rule"), ("weightless", "table-failed")])
def test_after_a_wrong_row_nothing_is_merged(weights: Sink, publisher: Publisher, transform: str, code: str) -> None:
    weights.transform = transform
    publisher.send(publisher.events(FEW))
    with raises(code, NAME):
        weights.run()
    assert (weights.rows(), weights.database.positions()) == ({}, {})
    weights.transform = "in_kilograms"
    assert weights.run() == Counts(FEW, applied=FEW)


def test_check_knows_what_was_left_out(sink: Sink, publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    events, bad, left_out = with_left_out(publisher, FEW)
    write_source(sink.settings, events)
    # The first record of this event is unreadable, so there is a dead letter of it. The second record is readable. The
    # transform leaves the event out, which closes the dead letter.
    publisher.send_raw(left_out[0].key, b"no event", left_out[0].event_id)
    publisher.send(events)
    sink.transform = "without_any"
    assert sink.run() == Counts(FEW, filtered=FEW, dead=1)
    before = DeltaTable(folder(sink.settings)).version()

    def found() -> tuple[object, ...]:
        report = sink.check(monkeypatch).sink(NAME)
        return report.drift, report.in_flight, report.lost, report.parked

    def again(transform: str, **counts: int) -> None:
        sink.transform = transform
        assert sink.run(from_start=True) == Counts(FEW, dead=1, filtered=2, **counts)

    again("picky", applied=FEW - 3, rejected=1)
    assert sink.database.statuses() == {bad.event_id: "open", left_out[0].event_id: "replayed"}
    assert found() == ({}, 0, 0, 1)
    sink.transform = "generous"
    assert sink.replay() == Replayed(applied=1)
    again("picky", duplicates=FEW - 2)
    assert sink.database.statuses()[bad.event_id] == "replayed", "the table has it: it is not set aside again"
    assert found() == ({}, 0, 0, 0)

    location = table.location(sink.settings, NAME)
    sink.spark.sql(f"RESTORE TABLE delta.`{location}` TO VERSION AS OF {before}")
    assert sink.rows() == {}
    again("generous", applied=FEW - 2)
    assert sink.rows().keys() == {one.event_id for one in events if one not in left_out}
    assert found() == ({}, 0, 0, 0)


def test_killed_behind_a_merge(sink: Sink, publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    events, bad, left_out = with_left_out(publisher, MANY)
    write_source(sink.settings, events)
    publisher.send(events)
    killed = catch_up_faulty("death_behind_a_merge", sink.settings, NAME, is_alone=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    merged = ids(sink.settings)
    assert merged
    assert sum(sink.database.positions().values()) == 0, "the fault fired: the positions know of no batch"
    # Beside a sink whose positions are behind its table, check goes by what the table's commit says. The event that
    # fails and those that are left out are in flight too, unless they come before that.
    found = sink.check(monkeypatch).sink(NAME)
    assert found.drift == {}
    assert MANY - 3 <= found.in_flight + len(merged) <= MANY
    done = catch_up_faulty("transformed", sink.settings, NAME)
    assert done.returncode == 0, done.stderr
    assert ids(sink.settings) == sorted({one.event_id for one in events} - {one.event_id for one in (bad, *left_out)})
    assert sink.database.statuses() == {bad.event_id: "open"}
    report = sink.check(monkeypatch)
    assert report.settled
    assert [(finding.code, finding.count) for finding in report.findings] == [("sink-parked", 1)]
