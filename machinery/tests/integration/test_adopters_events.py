"""Sinks of an adopter's events and SQL. Of several topics, each has its own keys, order, positions, dead letters and
rebuilds. Properties and tables may be called as what occurs in our SQL: no name of ours captures one. Postgres limits
how many columns events have, and how long a key is. What docs/projections.md shows is taken from there and run.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from decimal import Decimal
from functools import cache
from pathlib import Path
from random import Random
from textwrap import dedent
from typing import Any
from uuid import NAMESPACE_DNS, UUID, uuid5

import pytest
from psycopg2 import sql

import outbox
from outbox.base.database import connect, query
from outbox.base.sections import COMMENT
from outbox.base.settings import Settings, SinkRole, SourceRole
from outbox.events.catalog import COLUMNS_MAX, RESERVED, RESERVED_PREFIX, ROW_MAX_BYTES, SYSTEM, Catalog
from outbox.events.schema import PayloadSchema
from outbox.events.values import decode, encode
from outbox.kafka.topics import Topic
from outbox.sink import discovery
from outbox.sink.applying.postgres.applier import PostgresApplier
from outbox.sink.applying.postgres.target import PostgresTarget
from outbox.sink.decoding.batch import Returned
from outbox.sink.decoding.records import Record
from outbox.sink.remembering import strategy
from outbox.sink.remembering.asked import NAMES_MAX
from outbox.sink.remembering.positions import Beginning
from outbox.sink.repair import rebuild
from outbox.sink.repair.rebuild import RebuildResult
from outbox.sink.repair.replay import Replayed, Selection
from outbox.sink.spec import SinkSpec, Transformed
from outbox.sink.writer import Counts
from outbox_lab.testing.failures import raises
from tests.orders import cancelled, placed
from tests.seen import NAME, ORDERED, Seen, create_tables, id_of
from tests.support.declared import NUMBER, TOML, Events, payload
from tests.support.declared_sinks import batch_of, record, sink
from tests.support.made_events import NOW_MS, STRATEGIES, TOPIC_ID, Event, batch, nth_key, uuid7
from tests.support.paths import ROOT
from tests.support.sink_driver import Database, driving, projections_in, spec_with
from tests.support.suite import DOMAIN

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

    def test_from_the_topics_a_topic_with_results_must_be_read(self, databases: Settings, activity: SinkSpec) -> None:
        """Its topic was renamed, say."""
        item, order = self.topics(activity)
        self.apply(databases, activity, 0, Event(uuid7(RANDOM), KEY, 1, 1).record, topic="item")
        with rebuild.reserved(databases, "activity") as owner:
            with raises("topic-incomplete", item.name, "`outbox rebuild activity --from source`"):
                rebuild.begin(owner, "activity", [order], self.first(activity))
            rebuild.begin(owner, "activity", [item, order], self.first(activity))
            with raises("topic-incomplete", item.name):
                rebuild.swap(owner, "activity", [order], self.first(activity))
        assert self.counted(databases) == {("item", KEY): 1}

    @pytest.mark.parametrize("since", [slice(0, 2), slice(1, 2)], ids=["one more topic", "another topic"])
    def test_a_copy_of_other_topics_is_not_resumed(self, databases: Settings, activity: SinkSpec, since: slice) -> None:
        known = self.topics(activity)
        with driving(databases, activity), rebuild.reserved(databases, "activity") as owner:
            rebuild.begin(owner, "activity", known[:1], self.first(activity))
            with raises("copy-outdated", "`outbox rebuild activity --from topic --drop-copy`"):
                rebuild.begin(owner, "activity", known[since], self.first(activity))

    def test_a_copy_that_cannot_go_on_is_dropped(self, databases: Settings, activity: SinkSpec) -> None:
        """No other command takes its name."""
        copy, drop = rebuild.copy_of("activity"), "`outbox rebuild activity --from topic --drop-copy`"
        record = Event(uuid7(RANDOM), KEY, 1, 1).record
        item, order = self.topics(activity)
        with driving(databases, activity), rebuild.reserved(databases, "activity") as owner:
            rebuild.begin(owner, "activity", [item, order], self.first(activity))
            self.apply(databases, replace(activity, name=copy), 0, record, topic="item")
            fewer = replace(activity, decoders={order.name: activity.decoders[order.name]})
            for spec in (fewer, replace(activity, strategy=STRATEGIES["upsert"])):
                with raises("job-changed", drop), driving(databases, replace(spec, name=copy)):
                    pass
            with raises("events-lost", drop):
                self.apply(databases, replace(activity, name=copy), 5, record, topic="order")
            with raises("events-lost", drop):
                rebuild.swap(owner, "activity", [item, order], self.first(activity, item=3))
            with raises("topic-recreated", drop):
                rebuild.swap(owner, "activity", [item, Topic(order.name, "topic-2", 1)], self.first(activity))
            assert rebuild.drop_copy(owner, "activity")


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


# Names ---------------------------------------------------------------------------------------------------------------

PROJECTION = """
-- ordered
-- [refuse]
INSERT INTO rejections
SELECT new_events.event_id, 'unwelcome', 'as yet' FROM new_events
 WHERE new_events.event_id IN (SELECT unwelcome.event_id FROM unwelcome);
-- [apply]
INSERT INTO seen (sink, event)
SELECT %(sink)s, to_jsonb(new_events.*) FROM new_events ORDER BY new_events.partition, new_events."offset";
"""
# The key, the version, and whether there is a transform. In each turn the kinds of the properties are others.
# Each strategy takes two of the turns, one of them with a transform.
TURNS = [
    ("key", "version", False),
    ("batch", "new", True),
    ("identity", "known", True),
    ("o'clock `{version}", "it's {key}", False),
]
KINDS: list[dict[str, Any]] = [{"type": "string"}, {"type": "string", "format": "uuid"}, NUMBER]
SQL = re.compile(r"\b(SELECT|FROM|WHERE|AND|INSERT|CREATE|SET|CASE)\b")


@cache
def words() -> Sequence[str]:
    """All names in the SQL of the sinks that a property can have, in any case once."""
    sinks = Path(outbox.__file__).parent / "sink"
    texts = [COMMENT.sub("", file.read_text()) for root in (sinks, DOMAIN) for file in root.rglob("strategies/*.sql")]
    for file in (file for room in ("remembering", "applying", "repair") for file in (sinks / room).rglob("*.py")):
        assigned = [one for one in ast.parse(file.read_text()).body if isinstance(one, ast.Assign | ast.AnnAssign)]
        constants = [one.value for two in assigned for one in ast.walk(two) if isinstance(one, ast.Constant)]
        texts += [one for one in constants if isinstance(one, str) and SQL.search(one)]
    found = {word.lower() for text in texts for word in re.findall(r"[A-Za-z_]\w*", text)}
    assert {"batch", "conv", "incoming", "identity", "topic", "taken", "blocker", "letter", "select"} <= found
    return sorted(word for word in found - RESERVED - SYSTEM if not word.startswith(RESERVED_PREFIX))


class Unchanged(PostgresTarget):
    """The target of a sink whose transform changes nothing."""

    def applier(self, settings: Settings, spec: SinkSpec, _: Transformed | None = None) -> PostgresApplier:
        return super().applier(settings, spec, Transformed(spec.layout.schema, lambda _, rows: Returned(rows)))


class Names(Seen):
    """A sink whose events have these names."""

    def __init__(self, settings: Settings, folder: Path, by: str, turn: int, projection: str = PROJECTION) -> None:
        self.key, self.version, self.has_transform = TURNS[turn]
        names = [name for name in words() if name not in {self.key, self.version}]
        self.kinds = {name: KINDS[(place + turn) % 3] for place, name in enumerate(names)}
        self.kinds |= {self.key: KINDS[turn % 3], self.version: NUMBER}
        schema = {"type": "object", "required": list(self.kinds), "properties": self.kinds}
        toml = f'key = "{self.key}"\nversion = "{self.version}"\n'
        known = Events(folder / "events").aggregate("order", toml, placed_v1=schema).load()
        self.strategy = STRATEGIES[by]
        super().__init__(settings, folder, known, ["order"], projection=projection)

    @property
    def spec(self) -> SinkSpec:
        spec = replace(super().spec, strategy=self.strategy)
        changed = replace(spec, job=replace(spec.job, transform="any:thing"), target=Unchanged())
        return changed if self.has_transform else spec

    def value(self, name: str, number: int) -> object:
        if self.kinds[name] == NUMBER:
            return number * 1000 + list(self.kinds).index(name) + 1
        text = f"{name} {number}"
        return str(uuid5(NAMESPACE_DNS, text)) if "format" in self.kinds[name] else text

    def event(self, key: int, version: int) -> Record:
        """An event; no two have a value in common beside their key and version."""
        payload = {name: self.value(name, key * 100 + version) for name in self.kinds}
        payload |= {self.key: self.value(self.key, key), self.version: version}
        return record("placed", payload, key=str(payload[self.key]))

    def apply_again(self, topic: str, *records: Record, start: int = 0) -> Counts:
        batch = batch_of(self.spec, topic, *records, start=start)
        with self.running() as writer:
            if self.has_transform:
                writer.prepare(self.spec.layout.schema)
                batch = replace(batch, returned=Returned(batch.chunk.frame))
            return writer.apply(batch)

    def stored(self, query: str) -> dict[str, dict[str, Any]]:
        """By id the properties of the events that a query returns."""
        events = [event for (event,) in self.query(query) if isinstance(event, dict)]
        return {event["event_id"]: {name: event[name] for name in self.kinds} for event in events}


@pytest.fixture
def tables(databases: Settings) -> Settings:
    create_tables(databases)
    return databases


@pytest.mark.parametrize(
    ("by", "turn"), [(by, turn) for place, by in enumerate(sorted(STRATEGIES)) for turn in range(place % 2, 4, 2)]
)
def test_properties_may_have_the_names_that_occur_in_our_sql(
    tables: Settings, tmp_path: Path, by: str, turn: int
) -> None:
    """Events are applied, refused, parked, discarded, replayed and delivered again."""
    names = Names(tables, tmp_path, by, turn)
    first = [names.event(1, 1), names.event(1, 2), names.event(2, 1)]
    second = [names.event(1, 3), names.event(2, 2)]
    bad, *third = [names.event(2, 3)._replace(value=b"{"), names.event(2, 4), names.event(3, 1)]
    names.refuse(first[1])
    assert names.apply(ORDER, *first) == Counts(3, 2, rejected=1)
    assert names.apply(ORDER, *second) == Counts(2, 1, rejected=1)
    assert names.apply(ORDER, bad, *third) == Counts(2, 1, rejected=1, dead=1)
    names.refuse()
    assert Database(tables, names.spec.name).discard(Selection(identities=[id_of(bad)])) == 1
    assert names.replay() == Replayed(applied=3)
    assert by == "naive" or names.apply_again(ORDER, *first).applied == 0
    sent = {id_of(one): json.loads(one.value or b"") for one in [*first, *second, *third]}
    assert names.stored("SELECT event FROM seen ORDER BY line") == sent
    if by == "merge" and not names.has_transform:
        assert names.stored("SELECT event FROM landed_events") == sent


READS_TABLES = """
INSERT INTO seen (sink, event) SELECT found.mark, to_jsonb(found.*) FROM ({}) AS found;
"""


def test_a_projection_reads_the_tables_of_the_adopter(tables: Settings, tmp_path: Path) -> None:
    """Beside `new_events` and `rejections`, no table that a projection can name without its schema is ours."""
    with closing(connect(tables, SinkRole.OWNER)) as owner, owner, owner.cursor() as cursor:
        cursor.execute("SELECT relname FROM pg_class WHERE relnamespace IN ('public'::regnamespace, 11)")
        ours = {"new_events", "rejections", *(name for (name,) in cursor)}
        names = [name for name in words() if name not in ours]
        for name in names:
            identifier, role = sql.Identifier(name), sql.Identifier(tables.role_name(SinkRole.WRITER))
            cursor.execute(sql.SQL("CREATE TABLE public.{} AS SELECT {} AS mark").format(identifier, sql.Literal(name)))
            cursor.execute(sql.SQL("GRANT SELECT ON public.{} TO {}").format(identifier, role))
    assert {"batch", "dead"} <= {*names}
    marks = " UNION ALL ".join(f'SELECT mine.mark FROM "{name}" AS mine' for name in names)
    for turn in (0, 1):
        (folder := tmp_path / str(turn)).mkdir()
        one = Names(tables, folder, "dedup", turn, READS_TABLES.format(marks))
        assert one.apply(ORDER, one.event(1, 1)).applied == 1
        assert sorted(one.query("SELECT sink FROM seen")) == [(name,) for name in names for _ in range(turn + 1)]


# The page ------------------------------------------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "projections.md").read_text()
EVENTS = [Event(uuid7(RANDOM, NOW_MS + number), nth_key(number % 2), 1, number // 2 + 1) for number in range(6)]
LATE = "-- [refuse]\nINSERT INTO rejections (event_id, reason, detail)\nSELECT new.event_id, 'late'"
STORE = """
-- [apply]
INSERT INTO order_states AS stored (sink, order_id, version)
SELECT %(sink)s, order_id, max(version) FROM new_events GROUP BY order_id ORDER BY order_id
ON CONFLICT (sink, order_id) DO UPDATE SET version = excluded.version;
"""
LATEST = """
CREATE TABLE order_states (sink text, order_id text, version bigint, PRIMARY KEY (sink, order_id));
GRANT SELECT, INSERT, UPDATE ON order_states TO shop_sink_writer;
"""


def shown(beginning: str) -> str:
    """The one block of the page that begins so."""
    blocks = [dedent(block) for block in re.findall(r"(?:^ {4}.*\n)+", PAGE, re.MULTILINE)]
    (block,) = [block for block in blocks if block.startswith(beginning)]
    return block


def migrate(settings: Settings, statements: str) -> None:
    """Run SQL as a migration would."""
    query(settings, SinkRole.OWNER, statements.replace("shop_sink_writer", settings.role_name(SinkRole.WRITER)))


def test_the_projection_counts_each_event_once(databases: Settings, tmp_path: Path) -> None:
    projections = projections_in(tmp_path, shown("INSERT INTO events_a_day AS stored"), "events_a_day")
    migrate(databases, shown("CREATE TABLE events_a_day"))
    with driving(databases, spec_with(projections=projections)) as writer:
        writer.apply(batch(EVENTS[:4]))
        writer.apply(batch(EVENTS[2:], start=4))
    ((counted,),) = Database(databases).query("SELECT sum(events) FROM events_a_day")
    assert int(str(counted)) == len(EVENTS)


def test_the_strategy_is_one_file(databases: Settings, tmp_path: Path) -> None:
    (tmp_path / "young.sql").write_text(shown("-- New is what is younger"))
    spec = spec_with(strategy.load(tmp_path)["young"])
    [topic] = spec.topics
    old = batch_of(spec, topic, EVENTS[0].record, start=6)  # of a fixed moment in the past
    with driving(databases, spec) as writer:
        assert writer.apply(batch(EVENTS)) == Counts(rows=6, applied=6)
        assert writer.apply(old) == Counts(rows=1, duplicates=1)


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
    order = record("placed", {}, key=nth_key(0))._replace(value=encode({"order_id": nth_key(0), "lines": lines}))
    with driving(databases, spec) as writer:
        assert writer.apply(batch_of(spec, ORDER, order)).applied == 1
    found = Database(databases).query("SELECT product, price::text FROM order_prices ORDER BY product")
    assert found == [("CUP-7", "12345678901234.5678"), ("TEA-1", "0.10")]


def test_a_late_event_is_refused_by_the_version_that_is_stored(databases: Settings, tmp_path: Path) -> None:
    migrate(databases, LATEST)
    schema = payload({"order_id": {"type": "string"}, "version": NUMBER}, ("order_id", "version"))
    known = Events(tmp_path / "events").aggregate("order", placed_v1=schema).load()
    create_tables(databases)
    seen = Seen(databases, tmp_path, known, ["order"], projection=f"-- ordered\n{shown(LATE)}\n{STORE}")

    def order(number: int, key: str = "a") -> Record:
        return record("placed", {"id": key, "number": number, "order_id": key, "version": number})

    one = [order(number) for number in range(1, 6)]
    assert seen.apply(ORDER, one[1], one[0], order(1, "b")).applied == 3, "within a batch the order does not matter"
    assert seen.apply(ORDER, one[3]).applied == 1
    assert seen.apply(ORDER, one[2], one[4], order(2, "b")) == Counts(rows=3, applied=1, rejected=2)
    assert seen.apply(ORDER, one[0], one[3]) == Counts(rows=2, duplicates=2)
    assert seen.query("SELECT version FROM order_states ORDER BY order_id") == [(4,), (2,)]
    assert seen.letters("identity", "reason") == [(id_of(one[2]), "late"), (id_of(one[4]), "parked")]


def test_a_property_of_a_branch_alone_is_no_column() -> None:
    document = decode(shown("{").encode())
    columns = {one.name: (one.type, one.is_nullable) for one in PayloadSchema("payment", document).columns}
    assert columns == {
        "payment_id": ("text", False),
        "kind": ("text", False),
        "card": ("text", True),
        "till": ("bigint", True),
    }
    document["oneOf"][0]["properties"]["bank"] = {"type": "string"}
    assert columns.keys() == {one.name for one in PayloadSchema("payment", document).columns}
