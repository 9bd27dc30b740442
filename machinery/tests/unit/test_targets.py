"""Targets: what cannot be used is refused at the start, and what they read back; of a Delta table without Spark."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from confluent_kafka import KafkaError, KafkaException
from deltalake import CommitProperties, DeltaTable, write_deltalake

from outbox.audit import sinks
from outbox.audit.sinks import SinkState
from outbox.base.errors import Failure
from outbox.base.settings import Settings, load
from outbox.base.wait import WaitTimeoutError
from outbox.handlers import handler
from outbox.kafka import topics
from outbox.sink import discovery
from outbox.sink.applying.function import FunctionTarget
from outbox.sink.applying.lakehouse import table
from outbox.sink.applying.topics import TopicTarget
from outbox.sink.spec import SinkSpec, Target, TargetState
from outbox.targets import newest
from outbox_lab.testing.failures import raises
from tests import items, targets
from tests.lake import CHECKED, iceberg
from tests.support.made_events import MAIN, TOPIC

SETTINGS = load(environment=False)
FUNCTION = FunctionTarget(f"{targets.__name__}:write")


def spec_of(target: Target, **changed: Any) -> SinkSpec:
    return replace(MAIN, job=replace(MAIN.job, target=target, projections=Path("none"), **changed), target=target)


# Topics -------------------------------------------------------------------------------------------------------------


async def later(event: object) -> object:
    return event


def several(event: object) -> Iterator[object]:
    yield event


@pytest.mark.parametrize(
    ("target", "part"),
    [
        (TopicTarget(MAIN.topics[0]), "that it reads"),
        (TopicTarget("copies", by="stock.nowhere:by"), "cannot be imported"),
        (TopicTarget("copies", by="stock.service:INSERT"), "is no function"),
        (TopicTarget("copies", by="by"), "cannot be imported"),
        (TopicTarget("copies", by=f"{__name__}:later"), "async or a generator"),
        (TopicTarget("copies", by=f"{__name__}:several"), "async or a generator"),
    ],
)
def test_a_topic_that_cannot_be_written_is_refused(target: TopicTarget, part: str) -> None:
    with raises("sink-unusable", part):
        target.require_usable(spec_of(target))


def test_a_topic_takes_declared_events_and_no_projections(tmp_path: Path) -> None:
    target = TopicTarget("copies")
    target.require_usable(spec_of(target))
    with raises("sink-unusable", "declared events"):
        target.require_usable(spec_of(target, events=()))
    (tmp_path / "totals.sql").touch()
    with raises("sink-unusable", "totals.sql"):
        target.require_usable(replace(MAIN, job=replace(MAIN.job, projections=tmp_path), target=target))


def test_a_partition_that_no_broker_leads_is_unavailable_and_no_open_transaction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ask() -> None:
        raise KafkaException(KafkaError(KafkaError.LEADER_NOT_AVAILABLE))

    monkeypatch.setattr(topics, "REQUEST_TIMEOUT_S", 0.01)
    with pytest.raises(Failure) as raised:
        topics.ask_leaders("orders", ask)
    assert not isinstance(raised.value, WaitTimeoutError)
    assert raised.value.code == "kafka-unavailable"


# Functions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["def write(", "import sys; sys.exit(0)", "raise ValueError('a\\nb')"])
def test_a_module_that_cannot_be_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    (tmp_path / "broken_target.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    target = FunctionTarget("broken_target:write")
    spec = spec_of(target)
    for use in (
        lambda: target.require_usable(spec),
        lambda: target.state(SETTINGS, spec),
        lambda: target.erase(SETTINGS, spec, TOPIC, "a", dry_run=True),
    ):
        with raises("sink-unusable", "broken_target:write", "cannot be imported"):
            use()


def test_any_version_is_newer_than_none() -> None:
    columns = {"row": ["a", "a", "b", "b"], "version": [2, None, None, 1], "partition": [0] * 4, "offset": [0, 1, 2, 3]}
    found = newest(pa.table(columns), key="row", version="version")
    assert found.select(["row", "version"]).to_pylist() == [{"row": "b", "version": 1}, {"row": "a", "version": 2}]


@pytest.mark.parametrize(
    "declare",
    [
        lambda: handler(items.AGGREGATE)(several),  # type: ignore[arg-type]
        lambda: handler(print),  # type: ignore[arg-type]
        lambda: handler(items.AGGREGATE, workers=0),
        lambda: handler(items.AGGREGATE, attempts=0),
        lambda: handler(items.AGGREGATE, begin="newest"),  # type: ignore[arg-type]
    ],
    ids=["generator", "no events", "no workers", "no attempts", "another beginning"],
)
def test_a_handler_that_would_never_run_is_refused_at_once(declare: Callable[[], object]) -> None:
    with raises("sink-unusable"):
        declare()


# A Delta table as `outbox check` reads it, without Spark --------------------------------------------------------------


NAME = "lake"
COLUMNS = pa.schema({"item": pa.string(), "number": pa.decimal128(38, 0), "serial": pa.int64()})
TOTALS = "SELECT item AS key, sum(number) AS total, max(serial) AS version FROM events GROUP BY item, serial"


@pytest.fixture
def lake(tmp_path: Path) -> Settings:
    return load(tmp_path, environment=False).replace(sink_storage=f"file://{tmp_path}/lake")


def write(settings: Settings, *rows: tuple[str | None, int | None, int | None], said: str | None = None) -> None:
    """Commit rows; ``said`` is the commit's userMetadata."""
    columns = dict(zip(COLUMNS.names, zip(*rows, strict=True), strict=True))
    properties = None if said is None else CommitProperties(custom_metadata={"userMetadata": said})
    location = table.location(settings, NAME).removeprefix("file://")
    write_deltalake(location, pa.table(columns, COLUMNS), mode="append", commit_properties=properties)


def read(settings: Settings, query: str = TOTALS) -> TargetState:
    """The table as `outbox check` reads it."""
    file = settings.home / "totals.sql"
    file.write_text(query)
    return table.read(settings, NAME, file)


@pytest.mark.parametrize(
    ("query", "rows", "expected"),
    [
        (TOTALS, [("a", 10**37 + 1, 1), ("a", 10**37 + 1, 2), ("a", -1, 3)], [("a", 3, f"2{'0' * 36}1")]),
        (TOTALS, [("a", 5, 1), ("a", None, 2), ("b", None, None), (None, 6, 1)], [("a", 2, "5"), ("b", None, "0")]),
        ("SELECT item AS key, sum(number) AS total FROM events GROUP BY item", [("a", 5, 1)], [("a", None, "5")]),
    ],
    ids=["many digits", "nulls", "without versions"],
)
def test_totals_of_a_key_are_added_up(
    lake: Settings,
    query: str,
    rows: list[tuple[str | None, int | None, int | None]],
    expected: list[tuple[object, ...]],
) -> None:
    write(lake, *rows)
    assert sorted(sinks.totals_of(NAME, read(lake, query))) == [(NAME, *row) for row in expected]
    with raises("comparison-unusable", "has no column total"):
        read(lake, "SELECT item AS key FROM events")


@pytest.mark.parametrize(
    "said",
    [
        "nightly",
        "",
        "[1]",
        "null",
        "{}",
        json.dumps({"sink": "another", "positions": {"t": {"0": 9}}}),
        json.dumps({"sink": NAME, "job": 7}),
    ],
)
def test_commits_of_others_say_nothing_of_positions(lake: Settings, said: str) -> None:
    ours: dict[str, Any] = {"sink": NAME, "positions": {"t": {"0": 4}}}
    write(lake, ("a", 5, 1), said=json.dumps(ours))
    write(lake, ("a", 6, 2), said=said)
    assert sinks.with_target(SinkState(NAME, {"t": {0: 1}}), read(lake)).positions == {"t": {0: 4}}


def test_a_late_commit_of_an_earlier_driver_says_nothing_of_positions(lake: Settings) -> None:
    for number, (epoch, offset) in enumerate([(1, 3), (2, 5), (2, 9), (1, 4)]):
        said = {"sink": NAME, "positions": {"t": {"0": offset}}, "epoch": epoch}
        write(lake, ("a", 5, number), said=json.dumps(said))
    assert read(lake).positions == {"t": {0: 9}}


def test_a_merge_that_iceberg_would_commit_unchecked_is_refused(tmp_path: Path) -> None:
    settings, attributes = load(environment=False), iceberg(tmp_path)
    spec = discovery.resolve(settings, replace(discovery.sinks(settings)["lakehouse"].job, **attributes))
    spec.target.require_usable(spec)
    attributes["strategy"].write_text(attributes["strategy"].read_text().replace(CHECKED, " -- WHEN MATCHED\n"))
    unchecked = discovery.resolve(settings, spec.job)
    with raises("sink-unusable", "WHEN MATCHED"):
        unchecked.target.require_usable(unchecked)


def test_positions_are_those_of_the_content_while_the_sink_commits(lake: Settings) -> None:
    def commit(offsets: range) -> None:
        for offset in offsets:
            write(lake, ("a", 1, offset), said=json.dumps({"sink": NAME, "positions": {"t": {"0": offset}}}))

    commit(range(1, 2))
    writer = threading.Thread(target=commit, args=[range(2, 80)])
    writer.start()
    try:
        seen = set()
        while writer.is_alive():
            found = read(lake)
            reached = found.positions["t"][0]
            assert sinks.totals_of(NAME, found) == [(NAME, "a", reached, str(reached))]
            seen.add(reached)
    finally:
        writer.join()
    assert len(seen) > 1, "it was read while it was written"


def test_an_erased_key_is_in_no_file_of_the_table(lake: Settings) -> None:
    write(lake, ("a'b", 5, 1), ("c", 6, 1))
    write(lake, ("c", 7, 2))
    write(lake, ("b", 8, 1))
    DeltaTable(table.location(lake, NAME).removeprefix("file://")).delete("item = 'b'")
    folder = Path(table.location(lake, NAME).removeprefix("file://"))

    def erase(key: str, *, dry_run: bool = False) -> list[int]:
        return [*table.erase(lake, NAME, ["item"], key, [], dry_run=dry_run).values()]

    files = {*folder.glob("*.parquet")}
    assert erase("another") == [0, 0]
    assert {*folder.glob("*.parquet")} == files, "former files of other keys stay"
    assert erase("a'b", dry_run=True) == [1, 0]
    assert erase("a'b") == [1, 1]
    assert erase("a'b", dry_run=True) == [0, 0]
    left = [row for file in folder.glob("*.parquet") for row in pq.read_table(file).to_pylist()]
    assert {row["item"] for row in left} == {"c"}
    assert sinks.totals_of(NAME, read(lake)) == [(NAME, "c", 2, "13")]
    assert "a'b" in (folder / "_delta_log" / f"{0:020}.json").read_text(), "the log has the extremes of columns"


@pytest.mark.parametrize(("columns", "events"), [(["other"], []), (["item"], ["item.received", "item.picked"])])
def test_a_table_without_the_column_of_the_key_is_not_touched(
    lake: Settings, columns: list[str], events: list[str]
) -> None:
    write(lake, ("a", 5, 1))
    with raises("erase-unsupported"):
        table.erase(lake, NAME, columns, "a", events, dry_run=False)
