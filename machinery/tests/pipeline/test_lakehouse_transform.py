"""A transform before the Delta table: what the table gets, what is left out or set aside, and what survives a kill."""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable

from outbox.audit import check
from outbox.audit.report import Report
from outbox.base.settings import Settings, load
from outbox.sink import discovery
from outbox.sink.applying.lakehouse import table
from outbox.sink.applying.lakehouse.target import LakehouseTarget
from outbox.sink.repair.replay import Replayed
from outbox.sink.spark import reader
from outbox.sink.spec import SinkJob, SinkSpec
from outbox.sink.writer import Counts
from outbox_lab.testing.failures import raises
from outbox_lab.testing.fixtures.spark import leaves_sockets
from tests import transforms
from tests.lake import NAME, TOTALS, folder, ids, write_source
from tests.support import transformed
from tests.support.made_events import Event
from tests.support.sink_driver import Database
from tests.support.sink_process import Publisher, catch_up_faulty, catch_up_faulty_alone
from tests.transforms import GRAMS, LEFT_OUT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = leaves_sockets

RANDOM = Random(32)  # noqa: S311
JOB = discovery.sinks(load(environment=False))[NAME].job
FEW, MANY = 12, 120  # that the driver reads itself, and that executors read: no more than needed, as each costs queries
TABLE = """
CREATE TABLE IF NOT EXISTS events (
    event_id STRING NOT NULL, outbox_day DATE NOT NULL, partition INT NOT NULL, offset BIGINT NOT NULL,
    event_type STRING NOT NULL, item_id STRING NOT NULL, unit STRING NOT NULL, quantity BIGINT NOT NULL,
    version BIGINT NOT NULL, occurred_at TIMESTAMP NOT NULL, kilograms DECIMAL(38, 3) NOT NULL
) USING delta PARTITIONED BY (outbox_day) LOCATION %(location)s
"""
FAILS_AT = 13  # a quantity


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
        return discovery.resolve(self.settings, replace(self.job, transform=transform))

    def run(self, *, from_start: bool = False) -> Counts:
        """Apply what the topics have, from their start or from where the sink has come to."""
        return transformed.run(self.settings, self.spark, self.spec, from_start=from_start)

    def replay(self) -> Replayed:
        """Replay open letters, as the command does."""
        return transformed.run_replay(self.settings, self.spec)

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

    @property
    def database(self) -> Database:
        return Database(self.settings, NAME)


@pytest.fixture
def sink(topic: Settings, lakehouse_spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sink:
    """A sink with the table of the domain."""
    monkeypatch.setattr(reader, "TASK_MIN_RECORDS", 100)  # so that a part has two tasks
    lake = topic.replace(sink_storage=f"file://{tmp_path}/lake")
    return Sink(lake, lakehouse_spark, "picky")


@pytest.fixture
def weights(sink: Sink, tmp_path: Path) -> Sink:
    """A sink whose table has other columns than its events."""
    schema = tmp_path / "table.sql"
    schema.write_text(TABLE)
    sink.transform, sink.job = "in_kilograms", replace(JOB, target=LakehouseTarget(schema, TOTALS))
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


def with_failing(publisher: Publisher, count: int) -> tuple[list[Event], Event]:
    """Events, and one of them for which transforms fail."""
    events = publisher.events(count)
    events[count - 5] = replace(events[count - 5], quantity=FAILS_AT)
    return events, events[count - 5]


def with_left_out(publisher: Publisher, count: int) -> tuple[list[Event], Event, list[Event]]:
    """Events of which one fails, and two of one item that transforms leave out; together they change nothing."""
    events, bad = with_failing(publisher, count)
    for number, quantity in ((1, LEFT_OUT), (6, -LEFT_OUT)):
        events[number] = replace(events[number], quantity=quantity)
    assert events[1].key == events[6].key
    return events, bad, [events[1], events[6]]


@pytest.mark.parametrize(("transform", "count"), [("in_kilograms", FEW), ("in_kilograms_shuffled", MANY)])
def test_the_table_has_what_the_transform_returns_of_each_event_once(
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


def test_an_event_for_which_it_fails_is_set_aside_and_replayed(weights: Sink, publisher: Publisher) -> None:
    events, bad = with_failing(publisher, FEW)
    publisher.send(events)
    weights.transform = "failing_in_kilograms"
    assert weights.run() == Counts(FEW, applied=FEW - 1, rejected=1)
    assert weights.database.dead_letters() == {bad.event_id: "transform failed"}
    ((key, value, version),) = weights.database.query("SELECT key, value, version FROM dead_letters")
    assert bytes(value) == bad.record.value  # type: ignore[call-overload]
    assert (bytes(key).decode(), version) == (bad.key, bad.version)  # type: ignore[call-overload]
    assert weights.replay() == Replayed(rejected=1)
    assert weights.database.statuses() == {bad.event_id: "open"}
    weights.transform = "in_kilograms"
    assert weights.run(from_start=True) == Counts(FEW, duplicates=FEW), "it waits for a replay"
    assert weights.replay() == Replayed(applied=1)
    assert weights.replay() == Replayed()
    assert weights.rows().keys() == {one.event_id for one in events}
    assert weights.rows()[bad.event_id]["kilograms"] == kilograms(bad)
    weights.transform = "failing_in_kilograms"
    assert weights.run(from_start=True) == Counts(FEW, duplicates=FEW)
    assert weights.database.statuses() == {bad.event_id: "replayed"}, "the table has it: it is not set aside again"


# Each kind of a row that breaks a rule is tried with a projection (test_transform): what compares is the same.
@pytest.mark.parametrize(("transform", "code"), [("doubled", "transform-breaks-rule"), ("weightless", "table-failed")])
def test_a_wrong_row_stops_the_sink_with_nothing_merged(
    weights: Sink, publisher: Publisher, transform: str, code: str
) -> None:
    weights.transform = transform
    publisher.send(publisher.events(FEW))
    with raises(code, NAME):
        weights.run()
    assert (weights.rows(), weights.database.positions()) == ({}, {})
    weights.transform = "in_kilograms"
    assert weights.run() == Counts(FEW, applied=FEW)


def test_check_knows_what_was_left_out_and_what_was_set_aside(
    sink: Sink, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, bad, left_out = with_left_out(publisher, FEW)
    write_source(sink.settings, events)
    # Its record was unreadable first. So it has a letter, which is closed as it is left out.
    publisher.send_raw(left_out[0].key, b"no event", left_out[0].event_id)
    publisher.send(events)
    assert sink.run() == Counts(FEW, applied=FEW - 3, rejected=1, dead=1, filtered=2)
    assert sink.database.statuses() == {bad.event_id: "open", left_out[0].event_id: "replayed"}
    report = sink.check(monkeypatch).sink(NAME)
    assert (report.drift, report.in_flight, report.lost, report.parked, report.filtered) == ({}, 0, 0, 1, 2)
    sink.transform = "generous"
    assert sink.replay() == Replayed(applied=1)
    report = sink.check(monkeypatch).sink(NAME)
    assert (report.drift, report.in_flight, report.lost, report.parked, report.filtered) == ({}, 0, 0, 0, 2)


def test_replay_closes_a_dead_letter_whose_event_is_now_filtered(
    sink: Sink, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, bad = with_failing(publisher, FEW)
    publisher.send(events)
    sink.run()
    sink.transform = "without_any"
    assert sink.replay() == Replayed(filtered=1)
    assert sink.database.statuses() == {bad.event_id: "replayed"}
    assert sink.check(monkeypatch).sink(NAME).parked == 0
    assert len(sink.rows()) == FEW - 1


def test_a_restored_table_gets_all_events_that_are_not_left_out(
    sink: Sink, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, *_ = with_left_out(publisher, FEW)
    write_source(sink.settings, events)
    publisher.send(events)
    sink.transform = "without_any"
    assert sink.run() == Counts(FEW, filtered=FEW)
    before = DeltaTable(folder(sink.settings)).version()
    sink.transform = "picky"
    assert sink.run(from_start=True).applied == FEW - 3
    sink.transform = "generous"
    assert sink.replay() == Replayed(applied=1)
    whole = sink.rows()
    location = table.location(sink.settings, NAME)
    sink.spark.sql(f"RESTORE TABLE delta.`{location}` TO VERSION AS OF {before}")
    assert sink.rows() == {}
    assert sink.run(from_start=True) == Counts(FEW, applied=FEW - 2, filtered=2)
    assert sink.rows() == whole
    report = sink.check(monkeypatch).sink(NAME)
    assert (report.drift, report.parked) == ({}, 0)


def test_kill_behind_a_merge_loses_and_repeats_nothing(
    sink: Sink, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, bad, left_out = with_left_out(publisher, MANY)
    write_source(sink.settings, events)
    publisher.send(events)
    killed = catch_up_faulty_alone("death_behind_a_merge", sink.settings, NAME)
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
