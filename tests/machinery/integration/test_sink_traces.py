"""What is told of traced events, and that it is told of nothing that is not committed."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from random import Random

import pyarrow as pa
import pytest
from structlog.testing import capture_logs

from outbox.base.database import connect
from outbox.base.errors import Failure
from outbox.base.settings import Settings, SinkRole
from outbox.sink.batch import Batch
from outbox.sink.dead_letters import DeadLetter
from outbox.sink.spark.stream import _traced
from outbox.sink.traces import LIMIT, Traced
from tests.support.events import NOW_MS, STRATEGIES, TOPIC, TRACE, Event, batch, nth_key, traced, uuid7
from tests.support.sink_driver import open_sink, sink_on

RANDOM = Random(12)  # noqa: S311
PARENT = "00-{}-0123456789abcdef-01"
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
    refused = replace(EVENTS[1], key=EVENTS[0].item_id, unit="LTR", version=2)
    bad = DeadLetter(TOPIC, 0, 2, b"key", [], b"{", NOW_MS, None, "not JSON", "the value is not JSON")
    assert told(databases, "dedup", traced([EVENTS[0], refused], dead=[bad])) == [
        (EVENTS[0].event_id, 0, "applied"),
        (refused.event_id, 1, "set aside"),
        (None, 2, "set aside"),
    ]


def test_an_untraced_event_is_not_told(databases: Settings) -> None:
    some = traced(EVENTS)
    assert told(databases, "dedup", replace(some, traced=some.traced[1:2])) == [(EVENTS[1].event_id, 1, "applied")]
    assert told(databases, "dedup", batch(EVENTS, start=4)) == []


def test_nothing_is_told_of_a_batch_that_is_not_committed(databases: Settings, tmp_path: Path) -> None:
    failing = tmp_path / "failing.sql"
    failing.write_text("INSERT INTO rejected (event_id) SELECT event_id FROM fresh")
    with closing(connect(databases, SinkRole.WRITER)) as connection, capture_logs() as lines:
        sink = sink_on(connection, projection=failing)
        with pytest.raises(Failure):
            sink.apply(traced(EVENTS))
    assert lines == []


def test_a_commit_that_fails_tells_nothing(databases: Settings) -> None:
    """The constraint is looked at when all else is done: by the commit itself."""
    with closing(connect(databases, SinkRole.OWNER)) as owner, owner, owner.cursor() as cursor:
        cursor.execute("ALTER TABLE stock ADD UNIQUE (sink, unit) DEFERRABLE INITIALLY DEFERRED")
    with open_sink(databases) as sink, capture_logs() as lines, pytest.raises(Failure, match="refused offsets"):
        sink.apply(traced(EVENTS))
    assert lines == []


def test_of_a_flood_the_first_are_told_and_how_many_more_there_are(databases: Settings) -> None:
    count = LIMIT + 7
    ids = [uuid7(RANDOM) for _ in range(count)]
    table = pa.table(
        {
            "event_id": ids,
            "partition": pa.array([0] * count, pa.int32()),
            "offset": pa.array(range(count), pa.int64()),
            "traceparent": [None, *[PARENT.format(TRACE)] * (count - 1)],
        }
    )
    found, left_out = _traced(table)
    assert [one.offset for one in found] == list(range(1, LIMIT + 1))
    assert left_out == 6
    assert _traced(table.drop_columns("traceparent")) == ([], 0)

    some = replace(traced(EVENTS), traced_left_out=left_out)
    with open_sink(databases) as sink, capture_logs() as lines:
        sink.apply(some)
    assert lines[-1] == {
        "event": "more traced events than are told",
        "log_level": "info",
        "sink": "dedup",
        "left_out": left_out,
    }


def test_what_only_looks_sampled_or_has_no_uuid_is_read_with_care() -> None:
    table = pa.table(
        {
            "event_id": ["no uuid", EVENTS[0].event_id],
            "partition": [0, 1],
            "offset": [5, 6],
            "traceparent": [PARENT.format(TRACE), PARENT.format("x" * 32)],
        }
    )
    assert _traced(table) == ([Traced(TRACE, None, 0, 5)], 0)
