"""The sink `lakehouse` with an Iceberg table: each event once, if a driver commits late too, and beside maintenance."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from outbox.audit import check
from outbox.base.database import login
from outbox.base.errors import Failure
from outbox.base.settings import Settings, SinkRole
from outbox.base.wait import wait_for
from outbox.sink import discovery
from outbox.sink.applying.lakehouse import table
from outbox.sink.applying.lakehouse.spark_table import IcebergTable
from outbox.sink.repair.replay import Replayed
from outbox.sink.spec import SinkSpec, TargetState
from outbox.sink.writer import Counts
from outbox.sinks import IcebergTarget
from outbox_lab.testing.fixtures.spark import leaves_sockets, running_with
from tests.lake import NAME, SCHEMA, TOTALS, driven, events, iceberg, write_source
from tests.support.made_events import NOW_MS, TOPIC, Event, batch, sums
from tests.support.record_corpus import unread
from tests.support.sink_driver import Database, replayed
from tests.support.sink_process import Publisher, catch_up_faulty

pytestmark = leaves_sockets
RANDOM = Random(47)  # noqa: S311
DAY_MS = 24 * 60 * 60 * 1000
TIMEOUT_S = 120


@pytest.fixture(scope="module")
def iceberg_spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session of the module that can write Iceberg tables."""
    with running_with("iceberg", tmp_path_factory.mktemp("spark"), IcebergTarget(SCHEMA, TOTALS)) as started:
        yield started


@pytest.fixture
def lake(databases: Settings, iceberg_spark: SparkSession, tmp_path: Path) -> Settings:
    """Settings with databases and a folder of tables of this test alone."""
    return databases.replace(sink_storage=f"file://{tmp_path}/it's a lake")


def spec_of(settings: Settings) -> SinkSpec:
    return discovery.resolve(settings, replace(discovery.sinks(settings)[NAME].job, **iceberg(settings.home)))


def opened(settings: Settings, spark: SparkSession, kind: type[IcebergTable] = IcebergTable) -> Any:
    """The table, as a process without the fence has it."""
    schema = SCHEMA.read_text().replace("USING delta", "USING iceberg")
    uri, role = table.location(settings, NAME), login(settings, SinkRole.WRITER)
    found = kind(spark, spec_of(settings), schema, uri, role)
    found.make()
    return found


def read_table(settings: Settings) -> TargetState:
    """The table as `outbox check` reads it."""
    return table.read(settings, NAME, TOTALS, table.iceberg)


def rows(settings: Settings) -> list[str]:
    """The ids in the table, read without Spark."""
    with table.iceberg(settings, NAME) as found:
        return [] if found is None else sorted(found.table.scan().to_arrow()["event_id"].to_pylist())


def ids(some: Sequence[Event]) -> list[str]:
    return sorted(event.event_id for event in some)


def test_each_event_is_in_the_table_once_however_often_it_comes(lake: Settings) -> None:
    assert read_table(lake).positions == {}
    new, old, letter = events(4), events(2, at_ms=NOW_MS - 800 * DAY_MS), events(1)[0]
    with driven(lake, spec_of(lake)) as sink:
        assert sink.apply(batch([*new[:2], *old, new[0]])) == Counts(rows=5, applied=4, duplicates=1)
        assert sink.apply(batch(new[:2], start=0)) == Counts(rows=2, duplicates=2), "read again"
        assert sink.apply(batch([*new, *old], start=5)) == Counts(rows=6, applied=2, duplicates=4), "sent again"
    with driven(lake, spec_of(lake)) as sink:
        assert sink.apply(batch([*old, *new], start=11)) == Counts(rows=6, duplicates=6), "after a restart"
        assert read_table(lake).positions == {TOPIC: {0: 17}}, "by a commit with nothing new"
        sink.apply(batch([], start=17, dead=[unread(letter, 17)]))
        lacking = read_table(lake).lacking
        assert lacking is not None
        assert lacking([letter.event_id, new[0].event_id]) == {letter.event_id}
        assert replayed(lake, spec_of(lake)) == Replayed(applied=1)
    assert rows(lake) == ids([*new, *old, letter])
    assert {key: int(total) for key, total, _ in read_table(lake).totals} == sums([*new, *old, letter])
    assert read_table(lake).positions == {TOPIC: {0: 18}}, "a replay says nothing of positions, and hides none"


class LateTable(IcebergTable):
    """The table of a driver that stands still within its MERGE, between reading the table and its commit."""

    gate: Path
    """``begun`` is made in this folder when the table was read; the MERGE goes on when ``open`` is there."""

    def merge(self, rows: pa.Table, metadata: Mapping[str, Any] | None = None, without: Collection[str] = ()) -> int:
        gate, first = self.gate, min(rows["event_id"].to_pylist())

        def wait(event_id: str) -> bool:
            if event_id == first:  # in one task, because maintenance beside it needs a core too
                (gate / "begun").touch()
                wait_for("the gate", (gate / "open").exists, timeout_s=TIMEOUT_S)
            return True

        self._spark.udf.register("gate", wait, "boolean")
        self._merge = self._merge.replace("FROM batch)", "FROM batch WHERE gate(event_id))")
        return super().merge(rows, metadata, without)


@contextmanager
def late(settings: Settings, spark: SparkSession, some: Sequence[Event]) -> Iterator[list[object]]:
    """A driver without the fence merges events: it has read the table before the block, and commits behind it. Then the
    outcome is there.
    """
    found = opened(settings, spark, LateTable)
    found.gate = Path(mkdtemp(dir=Path(settings.lakehouse.removeprefix("file://")).parent))
    outcomes = list[object]()
    merge = partial(found.merge, batch(some).chunk.frame, {"positions": {TOPIC: {0: 1}}, "epoch": 1})
    thread = threading.Thread(target=try_to, args=[merge, outcomes])
    thread.start()
    wait_for("the other driver", (found.gate / "begun").exists, timeout_s=TIMEOUT_S)
    yield outcomes
    (found.gate / "open").touch()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


def test_a_driver_that_commits_late_is_refused(lake: Settings, iceberg_spark: SparkSession) -> None:
    before, some, more = events(2), events(4), events(4)
    with driven(lake, spec_of(lake)) as sink:
        sink.apply(batch(before))
        with late(lake, iceberg_spark, some[:3]) as outcomes:
            assert sink.apply(batch(some, start=2)).applied == 4
        assert outcomes == ["table-failed"]
        assert rows(lake) == ids([*before, *some])
        # The driver without the fence is first, and says less than there is.
        with late(lake, iceberg_spark, more) as outcomes:
            said = {"positions": {TOPIC: {0: 1}}, "epoch": 0}
            assert opened(lake, iceberg_spark).merge(batch(more[:3]).chunk.frame, said) == 3
        assert outcomes == ["table-failed"], "it had not read what the first has added"
        assert read_table(lake).positions == {TOPIC: {0: 6}}
        assert sink.apply(batch(more, start=6)) == Counts(rows=4, applied=1, duplicates=3)
        assert rows(lake) == ids([*before, *some, *more])
        assert read_table(lake).positions == {TOPIC: {0: 10}}


def try_to(merge: Callable[[], object], outcomes: list[object]) -> None:
    """Add the result, or the code of the Failure, to the outcomes."""
    try:
        outcomes.append(merge())
    except Failure as failure:
        outcomes.append(failure.code)


def maintain(spark: SparkSession, settings: Settings, call: str) -> None:
    """Call a procedure of Iceberg, as a person does beside the sink."""
    opened(settings, spark, Maintained).call(call)


class Maintained(IcebergTable):
    def call(self, procedure: str) -> None:
        """Call a procedure of Iceberg for the table."""
        name, _, rest = procedure.partition("(")
        self._spark.sql(f"CALL outbox.system.{name}(table => '{NAME}.events', {rest}").collect()


COMPACT = "rewrite_data_files(options => map('min-input-files', '2'))"
EXPIRE = "expire_snapshots(older_than => TIMESTAMP '2100-01-01 00:00:00', retain_last => 1)"


def test_compaction_and_expiry_beside_a_merge(lake: Settings, iceberg_spark: SparkSession) -> None:
    before, some = events(6), events(4)
    with driven(lake, spec_of(lake)) as sink:
        for number, event in enumerate(before):
            sink.apply(batch([event], start=number))
        files = data_files(lake)
        with late(lake, iceberg_spark, some) as outcomes:
            maintain(iceberg_spark, lake, COMPACT)
        assert outcomes == [4], "compaction adds no rows: the MERGE is committed behind it"
        assert len(data_files(lake)) == 2 < len(files)
        assert rows(lake) == ids([*before, *some])
        sink.apply(batch(some, start=6))

        maintain(iceberg_spark, lake, COMPACT)
        assert read_table(lake).positions == {TOPIC: {0: 10}}, "of the snapshot before that of compaction"
        maintain(iceberg_spark, lake, EXPIRE)
        assert read_table(lake).positions == {}, "those of the sink database count"
        assert Database(lake, NAME).positions() == {0: 10}
        assert sink.apply(batch([*before, *events(1)], start=10)) == Counts(rows=7, applied=1, duplicates=6)
        maintain(iceberg_spark, lake, EXPIRE)
        assert read_table(lake).positions == {TOPIC: {0: 17}}


def test_a_merge_that_has_read_an_expired_version_is_refused(lake: Settings, iceberg_spark: SparkSession) -> None:
    before, some = events(2), events(3)
    with driven(lake, spec_of(lake)) as sink:
        sink.apply(batch(before))
        with late(lake, iceberg_spark, some) as outcomes:
            sink.apply(batch(events(1, at_ms=NOW_MS - 5 * DAY_MS), start=2))
            maintain(iceberg_spark, lake, EXPIRE)
        assert outcomes == ["table-failed"], "nobody can say any more what was added meanwhile"
        assert len(rows(lake)) == 3


def data_files(settings: Settings) -> list[str]:
    """The files of the newest version."""
    with table.iceberg(settings, NAME) as found:
        return [] if found is None else [task.file.file_path for task in found.table.scan().plan_files()]


def test_an_erased_key_is_in_no_data_file(lake: Settings, iceberg_spark: SparkSession) -> None:
    gone, kept = events(6, keys=2)[::2], events(6, keys=2)[1::2]
    folder = Path(lake.lakehouse.removeprefix("file://"))

    def erase(*, dry_run: bool) -> list[int]:
        return [*spec.target.erase(lake, spec, TOPIC, gone[0].key, dry_run=dry_run).values()]

    spec = spec_of(lake)
    with driven(lake, spec_of(lake)) as sink:
        assert erase(dry_run=True) == [0, 0]
        sink.apply(batch([*gone, *kept]))
        maintain(iceberg_spark, lake, COMPACT.replace("'min-input-files', '2'", "'rewrite-all', 'true'"))
        orphan = folder / NAME / "data" / "left.parquet"
        pq.write_table(pq.read_table(data_files(lake)[0].removeprefix("file:")), orphan)
        assert erase(dry_run=True) == [3, 6], "in one more version, and in a file of a commit that never was"
        with late(lake, iceberg_spark, [replace(events(1)[0], key=kept[0].key)]) as outcomes:
            assert erase(dry_run=False) == [3, 6]
        assert outcomes == ["table-failed"], "its files are among the deleted"
        assert erase(dry_run=True) == [0, 0]
        left = [row["item_id"] for file in folder.rglob("*.parquet") for row in pq.read_table(file).to_pylist()]
        assert {*left} == {kept[0].key}
        assert read_table(lake).positions == {TOPIC: {0: 6}}, "time travel ends, and what the sink said stays"
        assert sink.apply(batch([*kept, *events(1)], start=6)) == Counts(rows=4, applied=1, duplicates=3)


def test_killed_behind_a_commit(topic: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = Publisher(topic)
    some = publisher.events(60)
    write_source(topic, some)
    publisher.send([*some, *some[:5]])
    spec = spec_of(topic)
    killed = catch_up_faulty("death_behind_a_commit_of_iceberg", topic, NAME, is_alone=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    merged = rows(topic)
    assert merged
    assert sum(Database(topic, NAME).positions().values()) == 0, "the fault fired: the positions know of no batch"
    monkeypatch.setattr(discovery, "jobs", lambda _: [spec.job])
    report = check.check(topic)
    assert (report.sink(NAME).drift, report.sink(NAME).in_flight) == ({}, 60 - len(merged))
    done = catch_up_faulty("iceberg", topic, NAME, is_alone=True)
    assert done.returncode == 0, done.stderr
    assert rows(topic) == ids(some)
    report = check.check(topic)
    assert report.settled
    assert report.findings == []
