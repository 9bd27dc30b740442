"""Limits of Postgres: events of as many columns as are allowed, and no key that is too long for an index."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID

import pytest
from psycopg2 import extensions

from outbox.base.database import connect, query
from outbox.base.settings import Settings, SinkRole
from outbox.events.catalog import COLUMNS_MAX, ROW_MAX_BYTES
from outbox.sink.applying.postgres.target import PostgresWriter
from outbox.sink.repair.replay import Replayed
from outbox.sink.writer import Counts
from tests.seen import Seen, create_tables
from tests.support.declared import NUMBER, Events, payload
from tests.support.declared_sinks import batch_of, record, sink
from tests.support.made_events import fetch

TOPIC = "shop.order"
PROJECTION = """
-- [refuse]
INSERT INTO rejections (event_id, reason, detail)
SELECT event_id, 'even', number::text FROM new_events WHERE number %% 2 = 0;

-- [apply]
INSERT INTO seen (sink, id, number) SELECT %(sink)s, id, number FROM new_events;
"""
TABLE = """
CREATE TABLE seen (sink text, id text, number bigint);
GRANT SELECT, INSERT ON seen TO {writer};
"""
OTHERS_BYTES = 24 + 8  # of the key and the version
LONG = Random(24).randbytes(4000).hex()  # noqa: S311 - Postgres cannot compress it into what an index takes
UUID_TEXT = str(UUID(int=2**128 - 1))
# By SQL type: a rule, how many columns of it there is room for, and a value that takes as much room as any.
WIDEST: Mapping[str, tuple[dict[str, Any], int, Any]] = {
    "text": ({"type": "string"}, 24, "abcdefghijklmnopqrstuvw"),
    "numeric": ({"type": "number"}, 24, 10**39 + 1),
    "jsonb": ({"type": "array"}, 24, ["123456789012345"]),
    "uuid": ({"type": "string", "format": "uuid"}, 16, UUID_TEXT),
    "bigint": (NUMBER, 8, 2**62),
    "timestamptz": ({"type": "string", "format": "date-time"}, 8, "2026-11-27T10:00:00Z"),
    "boolean": ({"type": "boolean"}, 8, True),
}


@pytest.fixture
def writing(databases: Settings) -> Iterator[extensions.connection]:
    query(databases, SinkRole.OWNER, TABLE.replace("{writer}", databases.role_name(SinkRole.WRITER)))
    with closing(connect(databases, SinkRole.WRITER)) as connection:
        yield connection


def widest(type_: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A schema with as many columns of a type as are allowed, and a payload without its key and version."""
    rule, width, value = WIDEST[type_]
    names = [f"p{number}" for number in range((ROW_MAX_BYTES - OTHERS_BYTES) // width)]
    return payload(dict.fromkeys(names, rule), required=tuple(names)), dict.fromkeys(names, value)


def alternating() -> tuple[dict[str, Any], dict[str, Any]]:
    """Columns of two types that Postgres aligns in turns."""
    (text, _, of_text), (bigint, _, of_bigint) = WIDEST["text"], WIDEST["bigint"]
    names = [f"p{number}" for number in range((ROW_MAX_BYTES - OTHERS_BYTES) // (24 + 8) * 2)]
    rules = {name: (text, bigint)[place % 2] for place, name in enumerate(names)}
    values = {name: (of_text[:-3], of_bigint)[place % 2] for place, name in enumerate(names)}
    return payload(rules, required=tuple(names)), values


@pytest.mark.parametrize("type_", [*WIDEST, "alternating"])
def test_an_event_of_the_most_columns_is_applied_and_refused(
    tmp_path: Path, writing: extensions.connection, databases: Settings, type_: str
) -> None:
    schema, values = alternating() if type_ == "alternating" else widest(type_)
    # Another event fills the table with columns, so that the row's bitmap of NULLs is as long as it can be.
    others = COLUMNS_MAX - len(schema["properties"]) - 1
    flags = {f"q{number}": {"type": "boolean"} for number in range(others)}
    first, second = ({name: flags[name] for name in part} for part in (list(flags)[:750], list(flags)[750:]))
    (tmp_path / "seen.sql").write_text(PROJECTION)
    events = Events(tmp_path / "events")
    known = events.aggregate("order", placed_v1=schema, paid_v1=payload(first), sent_v1=payload(second)).load()
    spec = sink(known, "order", projections=tmp_path)
    assert len(spec.layout.columns) == COLUMNS_MAX
    key = "k" * 23
    records = [record("placed", {"id": key, "number": number, **values}) for number in (1, 2)]
    writer = PostgresWriter(writing, spec, fetch)
    counts = writer.apply(batch_of(spec, TOPIC, *records))
    assert (counts.applied, counts.rejected, counts.dead) == (1, 1, 0)
    with writing, writing.cursor() as cursor:
        cursor.execute("SELECT number FROM seen")
        assert cursor.fetchall() == [(1,)]


@pytest.mark.parametrize("by", ["dedup", "upsert", "merge", "versions", "offsets"])
def test_an_event_with_a_key_that_no_index_takes_is_set_aside(databases: Settings, tmp_path: Path, by: str) -> None:
    create_tables(databases)
    known = Events(tmp_path / "events").aggregate("order", placed_v1=payload()).load()
    seen = Seen(databases, tmp_path, known, ["order"], by=by)
    good, bad = record("placed", {"id": "a", "number": 1}), record("placed", {"id": LONG, "number": 1})
    assert seen.apply(TOPIC, good, bad) == Counts(rows=1, applied=1, dead=1)
    assert seen.letters("status", "reason", "length(key)") == [("open", "schema violation", len(LONG))]
    assert seen.replay() == Replayed(rejected=1), "it stays as it is"
    assert seen.apply(TOPIC, record("placed", {"id": "a", "number": 2})) == Counts(rows=1, applied=1)
