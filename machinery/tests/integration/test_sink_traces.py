"""What is told of traced events, and that it is told of nothing that is not committed."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from structlog.testing import capture_logs

from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole
from outbox.sink.applying.postgres.writer import PostgresWriter
from outbox.sink.decoding.batch import TRACED_MAX, Batch, Returned
from outbox_lab.testing.failures import raises
from tests.support.made_events import (
    STRATEGIES,
    TRACE,
    Event,
    batch,
    dead_record,
    fetch,
    nth_key,
    other_unit,
    traced,
    uuid7,
)
from tests.support.sink_driver import open_sink, projections_in, sink_on, spec_with

RANDOM = Random(12)  # noqa: S311
EVENTS = [Event(uuid7(RANDOM), nth_key(number), 10 + number, 1, total_after=10 + number) for number in range(4)]


def told(settings: Settings, name: str, *batches: Batch) -> list[tuple[object, ...]]:
    """Event, offset and outcome of each line, in the order of the log."""
    with open_sink(settings, name) as sink, capture_logs() as lines:
        for one in batches:
            sink.apply(one)
    assert all(line["event"] == f"event {line['outcome']}" for line in lines)
    assert all((line["sink"], line["trace_id"], line["partition"]) == (name, TRACE, 0) for line in lines)
    return [(line["event_id"], line["offset"], line["outcome"]) for line in lines]


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_an_event_is_applied_and_read_again_it_is_a_duplicate(databases: Settings, name: str) -> None:
    again = "applied" if name == "naive" else "duplicate"
    assert told(databases, name, traced(EVENTS[:2]), traced(EVENTS[:2])) == [
        (EVENTS[0].event_id, 0, "applied"),
        (EVENTS[1].event_id, 1, "applied"),
        (EVENTS[0].event_id, 0, again),
        (EVENTS[1].event_id, 1, again),
    ]


def test_of_two_records_of_an_event_in_a_batch_one_is_applied(databases: Settings) -> None:
    event_id = EVENTS[0].event_id
    assert told(databases, "dedup", traced([EVENTS[0], EVENTS[0]])) == [
        (event_id, 0, "applied"),
        (event_id, 1, "duplicate"),
    ]


def test_what_cannot_be_decoded_or_is_refused_is_set_aside(databases: Settings) -> None:
    refused = other_unit(replace(EVENTS[1], key=EVENTS[0].key, version=2))
    bad = dead_record(2)
    assert told(databases, "dedup", traced([EVENTS[0], refused], dead=[bad])) == [
        (EVENTS[0].event_id, 0, "applied"),
        (refused.event_id, 1, "set aside"),
        (None, 2, "set aside"),
    ]


def test_what_a_transform_leaves_out_is_filtered(databases: Settings) -> None:
    plain, some = spec_with(), traced([*EVENTS[:2], EVENTS[0]])
    rows = some.chunk.events
    assert rows is not None
    kept = rows.filter([offset != 1 for offset in rows["offset"].to_pylist()])
    with closing(connect(databases, SinkRole.WRITER)) as connection, capture_logs() as lines:
        sink = PostgresWriter(connection, replace(plain, job=replace(plain.job, transform="not:loaded")), fetch)
        sink.prepare(plain.layout.schema)
        sink.apply(replace(some, returned=Returned(kept)))
    assert [(line["offset"], line["outcome"]) for line in lines] == [(0, "applied"), (1, "filtered"), (2, "duplicate")]


def test_an_untraced_event_is_not_told(databases: Settings) -> None:
    some = traced(EVENTS)
    one = replace(some, chunk=replace(some.chunk, traced=some.chunk.traced[1:2]))
    assert told(databases, "dedup", one) == [(EVENTS[1].event_id, 1, "applied")]
    assert told(databases, "dedup", batch(EVENTS, start=4)) == []


def test_nothing_is_told_of_a_batch_that_is_not_committed(databases: Settings, tmp_path: Path) -> None:
    failing = projections_in(tmp_path, "SELECT 1 / 0")
    with closing(connect(databases, SinkRole.WRITER)) as connection, capture_logs() as lines:
        sink = sink_on(connection, projections=failing)
        with raises("database-refused"):
            sink.apply(traced(EVENTS))
    assert lines == []


def test_a_commit_that_fails_tells_nothing(databases: Settings) -> None:
    """The constraint is looked at when all else is done: by the commit itself."""
    with closing(connect(databases, SinkRole.OWNER)) as owner, owner, owner.cursor() as cursor:
        cursor.execute("ALTER TABLE stock ADD UNIQUE (sink, unit) DEFERRABLE INITIALLY DEFERRED")
    with open_sink(databases) as sink, capture_logs() as lines, raises("database-refused", "refused offsets"):
        sink.apply(traced(EVENTS))
    assert lines == []


def test_of_a_flood_the_first_are_logged_and_how_many_more_there_are(databases: Settings) -> None:
    some = [Event(uuid7(RANDOM), nth_key(number), 1, 1) for number in range(TRACED_MAX + 6)]
    with open_sink(databases) as sink, capture_logs() as lines:
        sink.apply(traced(some))
    assert [line["offset"] for line in lines[:-1]] == list(range(TRACED_MAX))
    assert (lines[-1]["sink"], lines[-1]["left_out"]) == ("dedup", 6)
