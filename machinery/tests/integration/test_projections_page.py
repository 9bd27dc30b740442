"""The SQL and the schema in docs/projections.md, taken from there and run."""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from random import Random
from textwrap import dedent

from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole
from outbox.events.schema import PayloadSchema
from outbox.events.values import convert, decode, encode
from outbox.sink.applying.postgres.target import PostgresWriter
from outbox.sink.decoding.batch import Batch
from outbox.sink.decoding.decoder import DecodedEvent
from outbox.sink.decoding.records import Decoded, Record
from outbox.sink.remembering import strategy
from outbox.sink.writer import Counts
from tests.support.declared import Events
from tests.support.declared_sinks import sink
from tests.support.made_events import NOW_MS, Event, batch, chunk_of, fetch, nth_key, rows, uuid7
from tests.support.paths import ROOT
from tests.support.sink_driver import Database, projections_in, sink_on

PAGE = (ROOT / "docs" / "projections.md").read_text()
RANDOM = Random(6)  # noqa: S311
EVENTS = [Event(uuid7(RANDOM, NOW_MS + number), nth_key(number % 2), 1, number // 2 + 1) for number in range(6)]


def shown(beginning: str) -> str:
    """The one block of the page that begins so."""
    blocks = [dedent(block) for block in re.findall(r"(?:^ {4}.*\n)+", PAGE, re.MULTILINE)]
    (block,) = [block for block in blocks if block.startswith(beginning)]
    return block


def migrate(settings: Settings, statements: str) -> None:
    """Run SQL as a migration would."""
    with closing(connect(settings, SinkRole.OWNER)) as owner, owner, owner.cursor() as cursor:
        cursor.execute(statements.replace("shop_sink_writer", settings.role_name(SinkRole.WRITER)))


def test_the_projection_counts_each_event_once(databases: Settings, tmp_path: Path) -> None:
    projections = projections_in(tmp_path, shown("INSERT INTO events_a_day AS stored"), "events_a_day")
    migrate(databases, shown("CREATE TABLE events_a_day"))
    with closing(connect(databases, SinkRole.WRITER)) as connection:
        sink = sink_on(connection, projections=projections)
        sink.apply(batch(EVENTS[:4]))
        sink.apply(batch(EVENTS[2:], start=4))
    ((counted,),) = Database(databases).query("SELECT sum(events) FROM events_a_day")
    assert int(str(counted)) == len(EVENTS)


def test_the_strategy_is_one_file(databases: Settings, tmp_path: Path) -> None:
    (tmp_path / "young.sql").write_text(shown("-- New is what is younger"))
    young = strategy.load(tmp_path)["young"]
    with closing(connect(databases, SinkRole.WRITER)) as connection:
        sink = sink_on(connection, young)
        assert sink.apply(batch(EVENTS)) == Counts(rows=6, applied=6)
        old = batch(EVENTS[:1], start=6)
        [(name, columns)] = rows(EVENTS[:1], 6).items()
        two_hours_ago = [moment - timedelta(hours=2) for moment in columns["occurred_at"]]
        older = Decoded({name: {**columns, "occurred_at": two_hours_ago}}, [])
        old = replace(old, chunk=chunk_of(older))
        assert sink.apply(old) == Counts(rows=1, duplicates=1)


def test_nested_decimals_become_exact_rows(databases: Settings, tmp_path: Path) -> None:
    migrate(databases, shown("CREATE TABLE order_prices"))
    properties = {"order_id": {"type": "string", "format": "uuid"}, "lines": {"type": "array"}}
    schema = {"type": "object", "required": ["order_id", "lines"], "properties": properties}
    known = Events(tmp_path / "events").aggregate("order", 'key = "order_id"', placed_v1=schema).load()
    projections = projections_in(tmp_path, shown("INSERT INTO order_prices"), "order_prices")
    spec = sink(known, "order", projections=projections)
    lines = [
        {"product": "TEA-1", "price": Decimal("0.10")},
        {"product": "CUP-7", "price": Decimal("12345678901234.5678")},
    ]
    payload = encode({"order_id": nth_key(0), "lines": lines})
    headers = [("id", uuid7(RANDOM).encode()), ("eventType", b"placed"), ("schemaVersion", b"1")]
    decoder = spec.decoders["shop.order"]
    event = decoder.record(Record(nth_key(0).encode(), headers, payload, NOW_MS))
    assert isinstance(event, DecodedEvent)
    with closing(connect(databases, SinkRole.WRITER)) as connection:
        chunk = chunk_of(Decoded(decoder.rows([(event, 0, 0)]), []), spec, "shop.order")
        PostgresWriter(connection, spec, fetch).apply(Batch("shop.order", "t", {0: 0}, {0: 1}, chunk))
    found = Database(databases).query("SELECT product, price::text FROM order_prices ORDER BY product")
    assert found == [("CUP-7", "12345678901234.5678"), ("TEA-1", "0.10")]


def test_null_is_sql_null_in_a_column_and_json_null_inside(databases: Settings) -> None:
    assert convert("jsonb", None) is convert("numeric", None) is None
    inner = convert("jsonb", {"note": None})
    query = "SELECT %s::jsonb -> 'note' IS NULL, %s::jsonb ->> 'note' IS NULL"
    assert Database(databases).query(query, inner, inner) == [(False, True)]


def test_a_property_of_a_branch_alone_is_no_column() -> None:
    document = decode(shown("{").encode())
    columns = {one.name: (one.type, one.is_nullable) for one in PayloadSchema("payment", document).columns}
    assert columns == {
        "payment_id": ("text", False),
        "kind": ("text", False),
        "card": ("text", True),
        "till": ("bigint", True),
    }
    cash = {"payment_id": "1", "kind": "cash", "till": 1}
    assert PayloadSchema("payment", document).are_valid([cash, {"payment_id": "1", "kind": "card", "card": "c"}])
    assert not PayloadSchema("payment", document).are_valid([{**cash, "kind": "card"}])
    document["oneOf"][0]["properties"]["bank"] = {"type": "string"}
    assert "bank" not in [one.name for one in PayloadSchema("payment", document).columns]
