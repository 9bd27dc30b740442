"""A sink of several topics and events: keys, order, positions, dead letters and rebuilds are each topic's own. And the
limits that Postgres sets to events: how many columns they have, and how long a key is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID

import pytest

from outbox.base.database import query
from outbox.base.settings import Settings, SinkRole, SourceRole
from outbox.events.catalog import COLUMNS_MAX, ROW_MAX_BYTES, Catalog
from outbox.kafka.topics import Topic
from outbox.sink import discovery
from outbox.sink.decoding.records import Record
from outbox.sink.remembering.asked import NAMES_MAX
from outbox.sink.remembering.positions import Beginning
from outbox.sink.repair import rebuild
from outbox.sink.repair.rebuild import RebuildResult
from outbox.sink.repair.replay import Replayed
from outbox.sink.spec import SinkSpec
from outbox.sink.writer import Counts
from outbox_lab.testing.failures import raises
from tests.orders import cancelled, placed
from tests.seen import NAME, ORDERED, Seen, create_tables
from tests.support.declared import NUMBER, TOML, Events, payload
from tests.support.declared_sinks import batch_of, record
from tests.support.made_events import TOPIC_ID, Event, nth_key, uuid7
from tests.support.sink_driver import Database, driving

ORDER, INVOICE = "shop.order", "shop.invoice"
KEY = nth_key(1)
RANDOM = Random(61)  # noqa: S311


def order(number: int, key: str = KEY, **more: Any) -> Record:
    return record("placed", {"id": key, "number": number, **more})


def invoice(number: int, key: str = KEY, **more: Any) -> Record:
    return record("sent", {"id": key, "number": number, **more})


@pytest.fixture
def known(tmp_path: Path) -> Catalog:
    """Orders and invoices. Both are known by an `id`, which is a text here and a UUID there."""
    events = Events(tmp_path / "events")
    events.aggregate("order", TOML, placed_v1=payload(), cancelled_v1=payload())
    events.aggregate("invoice", TOML, sent_v1=payload({"id": {"type": "string", "format": "uuid"}}))
    return events.load()


@pytest.fixture
def seen(databases: Settings, tmp_path: Path, known: Catalog) -> Seen:
    """A sink of both topics."""
    create_tables(databases)
    return Seen(databases, tmp_path, known, ["order", "invoice"])


def test_upsert_keeps_a_version_of_each_thing_with_a_key(seen: Seen) -> None:
    seen.by = "upsert"
    assert seen.apply(ORDER, order(1), order(2)) == Counts(rows=2, applied=2)
    assert seen.apply(INVOICE, invoice(1)) == Counts(rows=1, applied=1)
    assert seen.apply(ORDER, order(1), order(2)) == Counts(rows=2, duplicates=2)
    assert seen.apply(INVOICE, invoice(2), invoice(1)) == Counts(rows=2, applied=1, duplicates=1)
    versions = seen.query("SELECT topic, key, version FROM key_versions ORDER BY topic")
    assert versions == [(INVOICE, KEY, 2), (ORDER, KEY, 2)]


def test_a_gap_of_one_is_reported_and_does_not_concern_the_other(seen: Seen) -> None:
    seen.apply(ORDER, order(1), order(2))
    with raises("events-lost", f"offsets 0 to 1 of topic {INVOICE}, partition 0"):
        seen.apply_again(INVOICE, invoice(1), start=2)
    assert seen.apply(INVOICE, invoice(1)).applied == 1


def test_each_event_is_a_view_with_its_own_columns(seen: Seen) -> None:
    columns = """SELECT array_agg(attname ORDER BY attnum)::text[] FROM pg_attribute
                  WHERE attrelid = %s::regclass AND attnum > 0"""
    with driving(seen.settings, seen.spec) as writer, writer.connections[0].cursor() as cursor:
        for view in ("new_order_placed", "new_order_cancelled", "new_invoice_sent"):
            cursor.execute(columns, [view])
            assert cursor.fetchall() == [(["event_id", "partition", "offset", "id", "number"],)]


def test_a_flood_of_names_does_not_hide_a_declared_event_that_a_sink_has_skipped(seen: Seen) -> None:
    """A sink records the events that it has not asked for. A later job that asks for them does not start."""
    seen.deploy("order.placed")
    seen.apply(ORDER, *[record(f"made.up-{number}", {}, key=KEY) for number in range(NAMES_MAX + 1)])
    seen.apply(ORDER, record("cancelled", {"id": KEY, "number": 2}))
    seen.deploy("order", is_decided=False)
    with raises("job-changed", "order.cancelled", f"outbox rewind {NAME} --to-earliest"), seen.running():
        pass


class TestDeadLetters:
    def test_an_unreadable_record_blocks_its_key_on_its_topic_only(self, seen: Seen) -> None:
        ordered = Seen(seen.settings, seen.folder, seen.known, seen.names, projection=ORDERED)
        assert ordered.apply(INVOICE, invoice(1)._replace(value=b"{"), invoice(2)) == Counts(1, rejected=1, dead=1)
        assert ordered.apply(ORDER, order(1), order(2)) == Counts(rows=2, applied=2)
        assert ordered.letters("topic", "reason") == [(INVOICE, "not JSON"), (INVOICE, "parked")]

    def test_a_replay_applies_those_of_every_topic_that_the_sink_reads(self, seen: Seen) -> None:
        bad = [order(1), invoice(1), order(2)]
        seen.refuse(*bad)
        seen.apply(ORDER, bad[0], bad[2])
        seen.apply(INVOICE, bad[1])
        seen.refuse()
        seen.deploy("order")
        assert seen.replay() == Replayed(applied=2, rejected=1)
        assert seen.letters("topic", "reason")[0] == (INVOICE, "not asked for")
        seen.deploy("order", "invoice")
        assert seen.replay() == Replayed(applied=1)
        applied = [(ORDER, "order.placed", 1), (ORDER, "order.placed", 2), (INVOICE, "invoice.sent", 1)]
        assert seen.events("topic", "event_type", "number") == applied


class TestRebuild:
    """The sink `activity` reads items and orders. An item and an order may have one key."""

    @pytest.fixture
    def activity(self, databases: Settings) -> SinkSpec:
        return discovery.sinks(databases)["activity"]

    def topics(self, activity: SinkSpec) -> list[Topic]:
        return [Topic(name, TOPIC_ID, 1) for name in activity.topics]

    def first(self, activity: SinkSpec, **offsets: int) -> dict[str, dict[int, int]]:
        return {name: {0: offsets.get(name.rpartition(".")[2], 0)} for name in activity.topics}

    def apply(self, settings: Settings, activity: SinkSpec, start: int, *records: Record, topic: str) -> Counts:
        name = next(name for name in activity.topics if name.endswith(f".{topic}"))
        with driving(settings, activity) as writer:
            return writer.apply(batch_of(activity, name, *records, start=start))

    def book(self, settings: Settings, table: str, key: str, version: int) -> None:
        """Let the source have an entity in a version."""
        rows = {
            "items": "(id, version, unit, stock) VALUES (%s, %s, 'KGM', 0)",
            "orders": "(id, version) VALUES (%s, %s)",
        }
        query(settings, SourceRole.OWNER, f"INSERT INTO {table} {rows[table]}", (key, version))

    def counted(self, settings: Settings, sink: str = "activity") -> dict[tuple[object, object], object]:
        query = "SELECT aggregate, key::text, events FROM activity WHERE sink = %s AND events > 0"
        return {(aggregate, key): events for aggregate, key, events in Database(settings).query(query, sink)}

    def test_from_the_source_sets_a_base_per_topic(self, databases: Settings, activity: SinkSpec) -> None:
        items = [Event(uuid7(RANDOM), KEY, 1, version).record for version in range(1, 6)]
        orders = [placed(KEY, 1), cancelled(KEY, 2), cancelled(KEY, 3)]
        self.apply(databases, activity, 0, items[0], topic="item")
        self.apply(databases, activity, 0, placed(nth_key(2), 1), topic="order")
        self.book(databases, "items", KEY, 4)
        self.book(databases, "orders", KEY, 2)
        done = rebuild.from_source(databases, activity, self.topics(activity), self.first(activity))
        assert done == RebuildResult({KEY: Decimal(5), nth_key(2): Decimal(-1)}, {})
        assert self.counted(databases) == {("item", KEY): 4, ("order", KEY): 2}
        bases = Database(databases).query("SELECT topic, key, version FROM base_versions ORDER BY topic")
        assert bases == [("stock.item", KEY, 4), ("stock.order", KEY, 2)]
        assert self.apply(databases, activity, 1, *items[1:], topic="item") == Counts(rows=4, applied=1, duplicates=3)
        assert self.apply(databases, activity, 1, *orders, topic="order") == Counts(rows=3, applied=1, duplicates=2)
        assert self.counted(databases) == {("item", KEY): 5, ("order", KEY): 3}

    def test_from_the_source_closes_the_letters_of_each_topic(self, databases: Settings, activity: SinkSpec) -> None:
        item, other = Event(uuid7(RANDOM), KEY, 1, 3).record, cancelled(KEY, 3)
        for topic, bad in (("item", item), ("order", other)):
            self.apply(databases, activity, 0, bad, topic=topic)
        letters = """
            INSERT INTO dead_letters (sink, identity, topic, topic_id, partition, "offset", key, is_event, version,
                                      reason, detail)
            SELECT 'activity', topic, topic, topic_id, 0, 0, %s, true, 3, 'test', '' FROM positions"""
        query(databases, SinkRole.WRITER, letters, [KEY.encode()])
        self.book(databases, "items", KEY, 3)  # and no order of that key
        rebuild.from_source(databases, activity, self.topics(activity), self.first(activity))
        assert Database(databases, "activity").statuses() == {"stock.item": "replayed", "stock.order": "open"}

    def test_from_the_topics_the_copy_takes_the_place(self, databases: Settings, activity: SinkSpec) -> None:
        items = [Event(uuid7(RANDOM), KEY, 1, version).record for version in (1, 2)]
        orders = [placed(KEY, 1), cancelled(KEY, 2), placed(nth_key(2), 1)]
        self.apply(databases, activity, 0, *items, topic="item")
        self.apply(databases, activity, 0, *orders, topic="order")
        query(databases, SinkRole.OWNER, "UPDATE activity SET events = 77")
        copy = replace(activity, name=rebuild.copy_of(activity.name))
        with rebuild.reserved(databases, "activity") as owner:
            assert not rebuild.begin(owner, "activity", self.topics(activity), self.first(activity))
        self.apply(databases, copy, 0, *items, topic="item")
        with rebuild.reserved(databases, "activity") as owner:
            dropped = self.first(activity, item=2)  # what the copy has
            assert rebuild.begin(owner, "activity", self.topics(activity), dropped), "it resumes"
        self.apply(databases, copy, 0, *orders[:1], topic="order")
        with rebuild.reserved(databases, "activity") as owner:
            first = self.first(activity, item=2, order=1)
            with raises("events-lost", "stock.order"):
                rebuild.swap(owner, "activity", self.topics(activity), self.first(activity, order=2))
            assert rebuild.swap(owner, "activity", self.topics(activity), first) == 1
        with driving(databases, activity) as writer:
            assert writer.beginning() == Beginning(1, {"stock.item": {0: 2}, "stock.order": {0: 1}})
        assert self.counted(databases) == {("item", KEY): 2, ("order", KEY): 1}
        assert self.apply(databases, activity, 1, *orders[1:], topic="order") == Counts(rows=2, applied=2)


OTHERS_BYTES = 24 + 8  # of the key and the version
# By SQL type: a rule, how many bytes of a row a column takes, and a value that takes as much room as any.
WIDEST: Mapping[str, tuple[dict[str, Any], int, Any]] = {
    "text": ({"type": "string"}, 24, "abcdefghijklmnopqrstuvw"),
    "numeric": ({"type": "number"}, 24, 10**39 + 1),
    "jsonb": ({"type": "array"}, 24, ["123456789012345"]),
    "uuid": ({"type": "string", "format": "uuid"}, 16, str(UUID(int=2**128 - 1))),
    "bigint": (NUMBER, 8, 2**62),
    "timestamptz": ({"type": "string", "format": "date-time"}, 8, "2026-11-27T10:00:00Z"),
    "boolean": ({"type": "boolean"}, 8, True),
}


class TestLimits:
    # The last are columns of two types that Postgres aligns in turns.
    @pytest.mark.parametrize("types", [*([one] for one in WIDEST), ["text", "bigint"]], ids=" and ".join)
    def test_an_event_of_the_most_columns_is_applied_and_refused(
        self, databases: Settings, tmp_path: Path, types: list[str]
    ) -> None:
        count = (ROW_MAX_BYTES - OTHERS_BYTES) // sum(WIDEST[one][1] for one in types) * len(types)
        columns = {f"p{number}": WIDEST[types[number % len(types)]] for number in range(count)}
        rules, values = ({name: of[place] for name, of in columns.items()} for place in (0, 2))
        # Other events fill the table with columns, so that the row's bitmap of NULLs is as long as it can be.
        flags = [f"q{number}" for number in range(COLUMNS_MAX - count - 3)]
        first, second = (payload({name: {"type": "boolean"} for name in some}) for some in (flags[:750], flags[750:]))
        events = Events(tmp_path / "events")
        events.aggregate("order", placed_v1=payload(rules, (*rules,)), paid_v1=first, sent_v1=second)
        create_tables(databases)
        seen = Seen(databases, tmp_path, events.load(), ["order"])
        assert len(seen.spec.layout.columns) == COLUMNS_MAX
        one, other = (order(number, "k" * 23, **values) for number in (1, 2))
        seen.refuse(other)
        assert seen.apply(ORDER, one, other) == Counts(rows=2, applied=1, rejected=1)
        assert seen.events("number") == [(1,)]

    @pytest.mark.parametrize("by", ["dedup", "upsert", "merge", "versions", "offsets"])
    def test_an_event_with_a_key_that_no_index_takes_is_set_aside(self, seen: Seen, by: str) -> None:
        seen.by, seen.names = by, ["order"]
        long = RANDOM.randbytes(4000).hex()  # which Postgres cannot compress into what an index takes
        assert seen.apply(ORDER, order(1), order(1, long)) == Counts(rows=1, applied=1, dead=1)
        assert seen.letters("status", "reason", "length(key)") == [("open", "schema violation", len(long))]
        assert seen.replay() == Replayed(rejected=1), "it stays as it is"
        assert seen.apply(ORDER, order(2)) == Counts(rows=1, applied=1)
