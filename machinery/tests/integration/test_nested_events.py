"""Events with nested, optional and exact values, from the declaration to a replay: an order with its lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pytest
from psycopg2 import extensions

from outbox.base.database import connect, query
from outbox.base.settings import Settings, SinkRole
from outbox.events.schema import Rejection
from outbox.sink.applying.postgres.applier import PostgresApplier
from outbox.sink.applying.postgres.target import PostgresWriter
from outbox.sink.decoding.batch import Batch
from outbox.sink.decoding.decoder import DecodedEvent
from outbox.sink.decoding.records import DeadRecord, Decoded, Record
from outbox.sink.repair.replay import Replayed, Selection, replay
from outbox.sink.spec import SinkSpec
from tests.support.declared import Events
from tests.support.declared_sinks import decoder, sink
from tests.support.made_events import NOW_MS, ON_TOPICS, chunk_of, fetch, uuid7

RANDOM = Random(51)  # noqa: S311
SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["order_id", "version", "total", "lines"],
    "properties": {
        "order_id": {"type": "string", "format": "uuid"},
        "version": {"type": "integer", "minimum": 1, "maximum": 2**63 - 1},
        "total": {"type": "number"},
        "is_gift": {"type": "boolean"},
        "note": {"type": ["string", "null"]},
        "lines": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["sku", "price"],
                "properties": {"sku": {"type": "string"}, "price": {"type": "number"}},
            },
        },
    },
}
TOML = 'key = "order_id"\nversion = "version"\n'
TOPIC = "shop.order"
PROJECTION = """
-- [refuse]
INSERT INTO rejections (event_id, reason, detail)
SELECT event_id, 'too many lines', jsonb_array_length(lines)::text FROM new_events WHERE jsonb_array_length(lines) > 2;

-- [apply]
INSERT INTO order_lines (sink, order_id, sku, price, total, is_gift, note)
SELECT %(sink)s, order_id, line ->> 'sku', (line ->> 'price')::numeric, total, is_gift, note
  FROM new_events, jsonb_array_elements(lines) AS line;
"""
TABLE = """
CREATE TABLE order_lines (
    sink text, order_id uuid, sku text, price numeric, total numeric, is_gift boolean, note text
);
GRANT SELECT, INSERT ON order_lines TO {writer};
"""
ORDER = {"order_id": "00000000-0000-0000-0000-00000000000a", "version": 1, "total": 0.30}
LINES = [{"sku": "a", "price": 0.1}, {"sku": "b", "price": 0.2, "color": "red"}]


@pytest.fixture
def spec(tmp_path: Path) -> SinkSpec:
    (tmp_path / "orders.sql").write_text(PROJECTION)
    known = Events(tmp_path / "events").aggregate("order", TOML, placed_v1=SCHEMA).load()
    return sink(known, "order", projections=tmp_path)


@pytest.fixture
def writing(databases: Settings) -> Iterator[extensions.connection]:
    query(databases, SinkRole.OWNER, TABLE.replace("{writer}", databases.role_name(SinkRole.WRITER)))
    with closing(connect(databases, SinkRole.WRITER)) as connection:
        yield connection


def record(value: dict[str, Any], version: str = "1") -> Record:
    headers = [("id", uuid7(RANDOM).encode()), ("eventType", b"placed"), ("schemaVersion", version.encode())]
    return Record(str(value.get("order_id")).encode(), headers, json.dumps(value).encode(), NOW_MS)


def decoded(spec: SinkSpec, value: dict[str, Any]) -> DecodedEvent:
    made = ON_TOPICS[TOPIC, (0, int(str(value["version"])) - 1)] = record(value)
    found = spec.decoders[TOPIC].record(made)
    assert isinstance(found, DecodedEvent), found
    return found


def stored(connection: extensions.connection) -> list[tuple[object, ...]]:
    with connection, connection.cursor() as cursor:
        cursor.execute("SELECT sku, price::text, total::text, is_gift, note FROM order_lines ORDER BY sku")
        return list(cursor.fetchall())


def test_an_order_with_lines_is_declared_applied_refused_and_replayed(
    spec: SinkSpec, writing: extensions.connection
) -> None:
    writer, decoding = PostgresWriter(writing, spec, fetch), spec.decoders[TOPIC]
    types = [column.type for column in decoding.types["order.placed"]]
    assert types == ["uuid", "bigint", "numeric", "boolean", "text", "jsonb"]
    good = decoded(spec, {**ORDER, "lines": LINES, "is_gift": True, "note": None})
    refused = decoded(spec, {**ORDER, "version": 2, "lines": [*LINES, {"sku": "c", "price": 1e2}]})
    newer = record({**ORDER, "version": 3, "lines": [{"sku": "d", "price": 12345678901234567890.5}]}, version="2")
    rejection = decoding.record(newer)
    assert isinstance(rejection, Rejection)
    dead = DeadRecord(0, 2, newer, decoding.event_id(newer), rejection)
    rows = decoding.rows([(good, 0, 0), (refused, 0, 1)])
    batch = Batch(TOPIC, "t", {0: 0}, {0: 3}, chunk_of(Decoded(rows, [dead]), spec, TOPIC))

    counts = writer.apply(batch)
    assert (counts.applied, counts.rejected, counts.dead) == (1, 1, 1)
    assert stored(writing) == [("a", "0.1", "0.3", True, None), ("b", "0.2", "0.3", True, None)]

    # Version 2 is declared now, and the projection takes three lines.
    (spec.job.projections / "orders.sql").write_text(PROJECTION.replace("> 2", "> 3"))
    events = Events(spec.job.projections / "events").aggregate("order", TOML, placed_v2=SCHEMA)
    events.write("order/upcast.py", "def placed_v1(payload):\n    return payload\n")
    known = {spec.name: sink(events.load(), "order", projections=spec.job.projections)}
    with writing, writing.cursor() as cursor:
        cursor.execute("DISCARD TEMP")  # the tables of the running sink
    chosen = Selection(sink=spec.name).choose(writing)
    assert replay(writing, known, chosen, applier_of=PostgresApplier) == {spec.name: Replayed(applied=2)}
    assert [row[:2] for row in stored(writing)] == [
        ("a", "0.1"),
        ("a", "0.1"),
        ("b", "0.2"),
        ("b", "0.2"),
        ("c", "100.0"),
        ("d", "12345678901234567000"),
    ]
    assert Selection(sink=spec.name).choose(writing) == []


@pytest.mark.parametrize("rule", [False, {"type": "string"}])
def test_nul_in_a_name_that_breaks_the_contract_is_a_dead_letter(
    spec: SinkSpec, writing: extensions.connection, tmp_path: Path, rule: object
) -> None:
    options = {"options": {"type": "object", "additionalProperties": rule}}
    schema = {**SCHEMA, "properties": SCHEMA["properties"] | options}
    decoding = decoder(Events(tmp_path / "other").aggregate("order", TOML, placed_v1=schema).load(), "order")
    bad = record({**ORDER, "lines": LINES, "options": {"a\0b": 1}})
    rejection = decoding.record(bad)
    assert isinstance(rejection, Rejection)
    dead = [DeadRecord(0, 0, bad, decoding.event_id(bad), rejection)]
    batch = Batch(TOPIC, "t", {0: 0}, {0: 1}, chunk_of(Decoded({}, dead), spec, TOPIC))
    assert PostgresWriter(writing, spec, fetch).apply(batch).dead == 1
    with writing, writing.cursor() as cursor:
        cursor.execute("SELECT detail FROM dead_letters")
        ((detail,),) = cursor.fetchall()
    assert detail.isprintable()
    assert "$.options" in detail
