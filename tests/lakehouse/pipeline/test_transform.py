"""A transform before the Delta table: what the table gets, what is left out or set aside, and what survives a kill."""

from __future__ import annotations

import signal
from contextlib import closing
from dataclasses import dataclass, replace
from decimal import ROUND_HALF_EVEN, Decimal
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable
from outbox.audit import check
from outbox.audit.report import Report
from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole, load
from outbox.sink import spec
from outbox.sink.batch import Returned
from outbox.sink.lakehouse import table as lakehouse_table
from outbox.sink.lakehouse import writer as lakehouse
from outbox.sink.lakehouse.target import LakehouseTarget
from outbox.sink.repair.replay import Replayed
from outbox.sink.spark import reader
from outbox.sink.spec import SinkJob, SinkSpec
from outbox.sink.writer import Counts
from outbox.testing.failures import raises
from outbox.testing.fixtures.spark import leaves_sockets
from structlog.testing import capture_logs

from tests.lakehouse import transforms
from tests.lakehouse.lake import NAME, folder, ids, staged_files, write_ledger
from tests.lakehouse.transforms import FAILS_AT, LEFT_OUT, RATES
from tests.support import transformed
from tests.support.declared_sinks import record
from tests.support.made_events import TOPIC, TOPIC_ID, Event, nth_key, traced, uuid7
from tests.support.sink_driver import Database
from tests.support.sink_process import Publisher, catch_up_faulty_alone
from tests.support.topic_reader import topic_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = leaves_sockets

RANDOM = Random(32)  # noqa: S311
JOB = spec.sinks(load(environment=False))[NAME].job
FEW, MANY = 40, 450  # that the driver reads itself, and that executors read
SIZES = pytest.mark.parametrize("count", [FEW, MANY], ids=["few", "many"])
TABLE = """
CREATE TABLE IF NOT EXISTS events (
    event_id STRING NOT NULL, event_day DATE NOT NULL, partition INT NOT NULL, offset BIGINT NOT NULL,
    event_type STRING NOT NULL, account_id STRING NOT NULL, currency STRING NOT NULL, amount BIGINT NOT NULL,
    version BIGINT NOT NULL, occurred_at TIMESTAMP NOT NULL, euro_cents DECIMAL(38, 2) NOT NULL
) USING delta PARTITIONED BY (event_day) LOCATION %(location)s
"""
OF_TWO_TOPICS = """
CREATE TABLE IF NOT EXISTS events (
    event_id STRING NOT NULL, event_day DATE NOT NULL, partition INT NOT NULL, offset BIGINT NOT NULL,
    event_type STRING NOT NULL, account_id STRING NOT NULL, amount BIGINT, label STRING
) USING delta PARTITIONED BY (event_day) LOCATION %(location)s
"""
TOTALS = "SELECT account_id AS key, sum(amount) AS total, 0 AS version FROM events GROUP BY account_id"


@dataclass
class Sink:
    """A sink with a transform and a table. Each run is a driver of its own."""

    settings: Settings
    spark: SparkSession
    transform: str
    job: SinkJob = JOB

    @property
    def spec(self) -> SinkSpec:
        transform = f"{transforms.__name__}:{self.transform}"
        return spec.resolve(self.settings, replace(self.job, transform=transform))

    def run(self, *, from_start: bool = False) -> Counts:
        """Apply what the topics have, from their start or from where the sink has come to."""
        return transformed.run(self.settings, self.spark, self.spec, from_start=from_start)

    def replay(self, *, dry_run: bool = False) -> Replayed:
        """Replay open letters, as the command does."""
        return transformed.replay(self.settings, self.spec, dry_run=dry_run)

    def rows(self) -> dict[str, dict[str, Any]]:
        """What the table has, by event; each is there once."""
        rows = DeltaTable(folder(self.settings)).to_pyarrow_table().to_pylist()
        found = {row["event_id"]: row for row in rows}
        assert len(found) == len(rows)
        return found

    def check(self, monkeypatch: pytest.MonkeyPatch) -> Report:
        """What `outbox check` says if this job is the project's only one."""
        monkeypatch.setattr(spec, "jobs", lambda _: [self.spec.job])
        return check.check(self.settings)

    @property
    def database(self) -> Database:
        return Database(self.settings, NAME)


@pytest.fixture
def sink(topic: Settings, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sink:
    """A sink with the table of the sample."""
    monkeypatch.setattr(reader, "TASK_MIN_RECORDS", 100)  # so that a part has two tasks
    lake = topic.model_copy(update={"sink_lakehouse": f"file://{tmp_path}/lake"})
    return Sink(lake, spark, "picky")


@pytest.fixture
def euros(sink: Sink, tmp_path: Path) -> Sink:
    """A sink whose table has other columns than its events."""
    sink.transform, sink.job = "in_euros", replace(JOB, target=target(tmp_path, TABLE))
    return sink


def target(tmp_path: Path, table: str) -> LakehouseTarget:
    schema, totals = tmp_path / "table.sql", tmp_path / "totals.sql"
    schema.write_text(table)
    totals.write_text(TOTALS)
    return LakehouseTarget(schema, totals)


def of_currencies(publisher: Publisher, count: int) -> list[Event]:
    """Events of both types in three currencies, one of which has no rate."""
    currencies = [*RATES, "JPY"]
    return [
        replace(event, unit=currencies[number % 3], quantity=event.quantity * (1 if number % 2 else -1))
        for number, event in enumerate(publisher.events(count))
    ]


def euro_cents(event: Event) -> Decimal:
    return (event.quantity * Decimal(RATES[event.unit])).quantize(Decimal("0.01"), ROUND_HALF_EVEN)


def with_failing(publisher: Publisher, count: int) -> tuple[list[Event], Event]:
    """Events, and one of them for which transforms fail."""
    events = publisher.events(count)
    events[count - 5] = replace(events[count - 5], quantity=FAILS_AT)
    return events, events[count - 5]


def with_left_out(publisher: Publisher, count: int) -> tuple[list[Event], Event, list[Event]]:
    """The same, and two of them that transforms leave out: of one account, which they leave as it was."""
    events, bad = with_failing(publisher, count)
    for number, quantity in ((1, LEFT_OUT), (6, -LEFT_OUT)):
        events[number] = replace(events[number], quantity=quantity)
    assert events[1].key == events[6].key
    return events, bad, [events[1], events[6]]


def nothing_is_left_of_staging(sink: Sink) -> bool:
    return staged_files(sink.settings) == [] == sink.database.staging_tables()


@SIZES
@pytest.mark.parametrize("transform", ["in_euros", "shuffled"])
def test_the_table_has_what_the_transform_returns_of_each_event_once(
    euros: Sink, publisher: Publisher, count: int, transform: str
) -> None:
    euros.transform = transform
    events = of_currencies(publisher, count)
    kept = {event.event_id: event for event in events if event.unit in RATES}
    again = sum(event.event_id in kept for event in events[:10])
    publisher.send([*events, *events[:10]])
    publisher.send_raw("key", b"no event", None)
    left_out = count + 10 - len(kept) - again
    assert euros.run() == Counts(count + 10, len(kept), duplicates=again, dead=1, filtered=left_out)
    rows = euros.rows()
    assert rows.keys() == kept.keys()
    for event_id, event in kept.items():
        row = rows[event_id]
        assert (row["euro_cents"], row["amount"], row["currency"]) == (euro_cents(event), event.quantity, event.unit)
        assert (row["event_type"], row["account_id"], row["version"]) == (event.name, event.key, event.version)
    # The table does not know what is left out.
    assert euros.run(from_start=True) == Counts(count + 10, duplicates=len(kept) + again, dead=1, filtered=left_out)
    assert euros.rows() == rows
    assert euros.database.query("SELECT applied, filtered FROM sinks") == [(len(kept), 2 * left_out)]
    assert nothing_is_left_of_staging(euros)


@SIZES
def test_a_batch_that_is_left_out_whole_moves_the_table_on(sink: Sink, publisher: Publisher, count: int) -> None:
    sink.transform = "nothing"
    publisher.send(publisher.events(count))
    assert sink.run() == Counts(count, filtered=count)
    assert sink.rows() == {}
    reached = lakehouse_table.read(sink.settings, NAME, JOB.projections / "balances.sql").positions
    assert reached == {topic_of(sink.settings): sink.database.positions()}


def test_the_events_of_two_topics_pass_it(sink: Sink, publisher: Publisher, tmp_path: Path) -> None:
    account = {"account_id": publisher.events(1)[0].key, "version": 1, "occurred_at": "2026-11-21T10:00:00Z"}
    opened = {**account, "kind": "user", "currency": "EUR", "label": "rent"}
    records = [record("opened", opened, 2, key=account["account_id"]) for _ in range(MANY)]  # type: ignore[arg-type]
    publisher.send_records(topic_of(sink.settings, "account"), records)
    events = publisher.events(FEW)
    publisher.send(events)
    sink.transform = "everything"
    sink.job = replace(JOB, events=["balance", "account.opened"], target=target(tmp_path, OF_TWO_TOPICS))
    assert sink.run() == Counts(MANY + FEW, applied=MANY + FEW)
    rows = sink.rows().values()
    assert sorted(row["amount"] for row in rows if row["label"] is None) == sorted(event.quantity for event in events)
    assert [row["event_type"] for row in rows if row["label"] == "rent"] == ["account.opened"] * MANY


@SIZES
def test_an_event_for_which_it_fails_is_set_aside_and_replayed_once_it_is_corrected(
    euros: Sink, publisher: Publisher, count: int
) -> None:
    events, bad = with_failing(publisher, count)
    publisher.send(events)
    euros.transform = "failing"
    assert euros.run() == Counts(count, applied=count - 1, rejected=1)
    assert euros.database.dead_letters() == {bad.event_id: "transform failed"}
    ((event, key, version),) = euros.database.query("SELECT event, key, schema_version FROM dead_letters")
    assert isinstance(event, dict)
    assert (event["amount"], event["balance_after"], event["event_type"]) == (FAILS_AT, bad.total_after, bad.name)
    assert (bytes(key).decode(), version) == (bad.key, 1)  # type: ignore[call-overload]
    assert euros.replay() == Replayed(rejected=1)
    assert euros.database.statuses() == {bad.event_id: "open"}
    euros.transform = "in_euros"
    assert euros.run(from_start=True) == Counts(count, duplicates=count), "it waits for a replay"
    assert euros.replay(dry_run=True) == Replayed(applied=1)
    assert len(euros.rows()) == count - 1
    assert euros.database.statuses() == {bad.event_id: "open"}
    assert euros.replay() == Replayed(applied=1)
    assert euros.replay() == Replayed()
    assert euros.rows().keys() == {one.event_id for one in events}
    assert euros.rows()[bad.event_id]["euro_cents"] == euro_cents(bad)
    assert euros.database.statuses() == {bad.event_id: "replayed"}


def test_an_event_that_the_table_has_is_not_set_aside(sink: Sink, publisher: Publisher) -> None:
    events, _ = with_failing(publisher, FEW)
    publisher.send(events)
    sink.transform = "generous"
    sink.run()
    sink.transform = "picky"
    assert sink.run(from_start=True) == Counts(FEW, duplicates=FEW)
    assert sink.database.dead_letters() == {}


@SIZES
@pytest.mark.parametrize("transform", ["doubled", "invented", "moved"])
def test_a_row_that_is_not_that_of_its_event_stops_the_sink(
    sink: Sink, publisher: Publisher, count: int, transform: str
) -> None:
    sink.transform = transform
    publisher.send(publisher.events(count))
    publisher.send_raw("key", b"no event", None)
    with raises("transform-breaks-rule", NAME):
        sink.run()
    assert sink.rows() == {}
    assert (sink.database.positions(), sink.database.dead_letters()) == ({}, {})


def test_a_row_that_the_table_does_not_take_stops_the_sink(euros: Sink, publisher: Publisher) -> None:
    euros.transform = "without_rates"
    publisher.send(publisher.events(FEW))
    with raises("table-failed", NAME):
        euros.run()
    assert euros.rows() == {}
    euros.transform = "in_euros"
    assert euros.run() == Counts(FEW, applied=FEW)


@SIZES
def test_check_knows_what_was_left_out_and_what_was_set_aside(
    sink: Sink, publisher: Publisher, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, bad, left_out = with_left_out(publisher, count)
    write_ledger(sink.settings, events)
    # Its record was unreadable first. So it has a letter, which is closed as it is left out.
    publisher.send_raw(left_out[0].key, b"no event", left_out[0].event_id)
    publisher.send(events)
    assert sink.run() == Counts(count, applied=count - 3, rejected=1, dead=1, filtered=2)
    assert sink.database.statuses() == {bad.event_id: "open", left_out[0].event_id: "skipped"}
    report = sink.check(monkeypatch).sink(NAME)
    assert (report.drift, report.in_flight, report.lost, report.parked, report.filtered) == ({}, 0, 0, 1, 2)
    sink.transform = "generous"
    assert sink.replay() == Replayed(applied=1)
    report = sink.check(monkeypatch).sink(NAME)
    assert (report.drift, report.in_flight, report.lost, report.parked, report.filtered) == ({}, 0, 0, 0, 2)


def test_a_letter_whose_event_is_left_out_by_now_is_closed_by_a_replay(
    sink: Sink, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, bad = with_failing(publisher, FEW)
    publisher.send(events)
    sink.run()
    sink.transform = "nothing"
    assert sink.replay(dry_run=True) == Replayed(filtered=1)
    assert sink.database.statuses() == {bad.event_id: "open"}
    assert sink.replay() == Replayed(filtered=1)
    assert sink.database.statuses() == {bad.event_id: "skipped"}
    assert sink.check(monkeypatch).sink(NAME).parked == 0
    assert len(sink.rows()) == FEW - 1


def test_a_restored_table_gets_all_events_again_but_those_that_are_left_out(
    sink: Sink, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = FEW
    events, bad, _ = with_left_out(publisher, count)
    write_ledger(sink.settings, events)
    publisher.send(events)
    sink.transform = "nothing"
    first = Counts(count, filtered=count)
    assert sink.run() == first
    before = DeltaTable(folder(sink.settings)).version()
    sink.transform = "picky"
    assert sink.run(from_start=True).applied == count - 3
    sink.transform = "generous"
    assert sink.replay() == Replayed(applied=1)
    whole = sink.rows()
    location = lakehouse_table.location(sink.settings, NAME)
    sink.spark.sql(f"RESTORE TABLE delta.`{location}` TO VERSION AS OF {before}")
    assert sink.rows() == {}
    assert sink.run(from_start=True) == Counts(count, applied=count - 2, filtered=2)
    assert sink.rows() == whole
    # The same if the transform fails again for an event whose letter was replayed.
    sink.spark.sql(f"RESTORE TABLE delta.`{location}` TO VERSION AS OF {before}")
    sink.transform = "picky"
    assert sink.run(from_start=True) == Counts(count, applied=count - 3, rejected=1, filtered=2)
    assert sink.database.statuses() == {bad.event_id: "open"}
    report = sink.check(monkeypatch).sink(NAME)
    assert (report.drift, report.parked) == ({}, 1)
    # Its letter was replayed, and the restored table lacks the event; but it is not set aside if it is left out.
    sink.transform = "generous"
    sink.replay()
    sink.spark.sql(f"RESTORE TABLE delta.`{location}` TO VERSION AS OF {before}")
    sink.transform = "nothing"
    assert sink.run(from_start=True) == first
    assert sink.check(monkeypatch).sink(NAME).parked == 0


def test_where_tasks_cannot_write_files_the_driver_transforms_large_batches(
    sink: Sink, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lakehouse, "is_reachable", lambda _: False)
    events, bad, left_out = with_left_out(publisher, MANY)
    publisher.send(events)
    assert sink.run() == Counts(MANY, applied=MANY - 3, rejected=1, filtered=2)
    assert sink.rows().keys() == {one.event_id for one in events} - {one.event_id for one in (bad, *left_out)}
    sink.transform = "doubled"
    with raises("transform-breaks-rule", NAME):
        sink.run(from_start=True)


def test_traced_events_are_told_with_what_became_of_them(
    databases: Settings, spark: SparkSession, tmp_path: Path
) -> None:
    del spark  # it is the active session
    settings = databases.model_copy(update={"sink_lakehouse": f"file://{tmp_path}/lake"})
    declared = spec.resolve(settings, replace(JOB, transform="not:loaded"))
    events = [Event(uuid7(RANDOM), nth_key(1), 100 + number, 1 + number) for number in range(4)]
    made = traced([*events, events[0]])
    rows = declared.layout.table(made.rows)
    kept = rows.filter([offset in (0, 3, 4) for offset in rows["offset"].to_pylist()])
    returned = Returned(kept, row_count=3, failed={(0, 2): "it fails"})
    with closing(connect(settings, SinkRole.WRITER)) as connection, capture_logs() as lines:
        writer = JOB.target.writer(settings, connection, declared)
        writer.prepare(declared.layout.schema)
        writer.positions(TOPIC, TOPIC_ID)
        assert writer.apply(replace(made, returned=returned)) == Counts(5, 2, duplicates=1, rejected=1, filtered=1)
        writer.close()
    assert [(line["offset"], line["outcome"]) for line in lines] == [
        (0, "applied"),
        (1, "filtered"),
        (2, "set aside"),
        (3, "applied"),
        (4, "duplicate"),
    ]


@pytest.mark.parametrize(("fault", "count"), [("death_before_a_merge", FEW), ("death_behind_a_merge", MANY)])
def test_killed_between_its_steps_it_loses_nothing_and_repeats_nothing(
    sink: Sink, publisher: Publisher, fault: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, bad, left_out = with_left_out(publisher, count)
    write_ledger(sink.settings, events)
    publisher.send(events)
    killed = catch_up_faulty_alone(fault, sink.settings, NAME)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    merged = len(ids(sink.settings))
    assert (merged > 0) is (fault == "death_behind_a_merge")
    assert sum(sink.database.positions().values()) == 0, "the fault fired: the positions know of no batch"
    done = catch_up_faulty_alone("transformed", sink.settings, NAME)
    assert done.returncode == 0, done.stderr
    assert ids(sink.settings) == sorted({one.event_id for one in events} - {one.event_id for one in (bad, *left_out)})
    assert sink.database.statuses() == {bad.event_id: "open"}
    assert nothing_is_left_of_staging(sink)
    report = sink.check(monkeypatch)
    assert report.settled
    assert [(finding.code, finding.count) for finding in report.findings] == [("sink-parked", 1)]
