"""SQL of an adopter: what docs/projections.md shows, taken from there and run; and properties and tables that are
called as what occurs in our SQL, of which no name of ours captures one.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from decimal import Decimal
from functools import cache
from pathlib import Path
from random import Random
from textwrap import dedent
from typing import Any
from uuid import NAMESPACE_DNS, uuid5

import pytest
from psycopg2 import sql

import outbox
from outbox.base.database import connect, query
from outbox.base.sections import COMMENT
from outbox.base.settings import Settings, SinkRole
from outbox.events.catalog import RESERVED, RESERVED_PREFIX, SYSTEM
from outbox.events.schema import PayloadSchema
from outbox.events.values import decode, encode
from outbox.sink.applying.postgres.applier import PostgresApplier
from outbox.sink.applying.postgres.target import PostgresTarget
from outbox.sink.decoding.batch import Returned
from outbox.sink.decoding.records import Record
from outbox.sink.remembering import strategy
from outbox.sink.repair.replay import Replayed, Selection
from outbox.sink.spec import SinkSpec, Transformed
from outbox.sink.writer import Counts
from tests.seen import Seen, create_tables, id_of
from tests.support.declared import NUMBER, Events, payload
from tests.support.declared_sinks import batch_of, record, sink
from tests.support.made_events import NOW_MS, STRATEGIES, Event, batch, nth_key, uuid7
from tests.support.paths import ROOT
from tests.support.sink_driver import Database, driving, projections_in, spec_with
from tests.support.suite import DOMAIN

TOPIC = "shop.order"
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
    assert names.apply(TOPIC, *first) == Counts(3, 2, rejected=1)
    assert names.apply(TOPIC, *second) == Counts(2, 1, rejected=1)
    assert names.apply(TOPIC, bad, *third) == Counts(2, 1, rejected=1, dead=1)
    names.refuse()
    assert Database(tables, names.spec.name).discard(Selection(identities=[id_of(bad)])) == 1
    assert names.replay() == Replayed(applied=3)
    assert by == "naive" or names.apply_again(TOPIC, *first).applied == 0
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
        assert one.apply(TOPIC, one.event(1, 1)).applied == 1
        assert sorted(one.query("SELECT sink FROM seen")) == [(name,) for name in names for _ in range(turn + 1)]


# The page ------------------------------------------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "projections.md").read_text()
RANDOM = Random(6)  # noqa: S311
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
        assert writer.apply(batch_of(spec, TOPIC, order)).applied == 1
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
    assert seen.apply(TOPIC, one[1], one[0], order(1, "b")).applied == 3, "within a batch the order does not matter"
    assert seen.apply(TOPIC, one[3]).applied == 1
    assert seen.apply(TOPIC, one[2], one[4], order(2, "b")) == Counts(rows=3, applied=1, rejected=2)
    assert seen.apply(TOPIC, one[0], one[3]) == Counts(rows=2, duplicates=2)
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
