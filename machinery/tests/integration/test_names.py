"""Names of ours capture no name of the adopter's: properties and tables are called as what occurs in our SQL."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_DNS, uuid5

import pyarrow as pa
import pytest
from psycopg2 import sql

from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole
from outbox.sink.applying.postgres.applier import PostgresApplier
from outbox.sink.applying.postgres.target import PostgresWriter
from outbox.sink.applying.postgres.transforming import TransformingApplier, columns_of
from outbox.sink.decoding.batch import Batch, Returned
from outbox.sink.decoding.records import Record
from outbox.sink.repair import replay
from outbox.sink.repair.replay import Replayed, Selection
from outbox.sink.spec import SinkSpec
from outbox.sink.writer import Counts
from tests.seen import Seen, create_tables
from tests.support.declared import NUMBER, Events
from tests.support.declared_sinks import batch_of, record
from tests.support.made_events import STRATEGIES, fetch
from tests.support.sink_driver import Database
from tests.support.sql_names import KINDS, words

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


@dataclass
class Names:
    """A sink whose events have these names, and what an operator does to it."""

    settings: Settings
    folder: Path
    by: str
    turn: int
    projection: str = PROJECTION

    def __post_init__(self) -> None:
        self.key, self.version, self.has_transform = TURNS[self.turn]
        names = [name for name in words() if name not in {self.key, self.version}]
        self.kinds = {name: KINDS[(place + self.turn) % 3] for place, name in enumerate(names)}
        self.kinds |= {self.key: KINDS[self.turn % 3], self.version: NUMBER}
        schema = {"type": "object", "required": list(self.kinds), "properties": self.kinds}
        toml = f'key = "{self.key}"\nversion = "{self.version}"\n'
        known = Events(self.folder / "events").aggregate("order", toml, placed_v1=schema).load()
        self.seen = Seen(self.settings, self.folder, known, ["order"], projection=self.projection)
        spec = self.seen.spec
        job = replace(spec.job, transform="any:thing" if self.has_transform else None)
        self.spec = replace(spec, job=job, strategy=STRATEGIES[self.by])
        self.end = 0

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

    def batch(self, *records: Record) -> Batch:
        """The next batch."""
        found = batch_of(self.spec, TOPIC, *records, start=self.end)
        self.end += len(records)
        return found

    def passed(self, batch: Batch, *, filtered: Sequence[Record] = (), failed: Sequence[Record] = ()) -> Batch:
        """The batch with what a transform returns that changes nothing, but for those that it filters or fails for."""
        if not self.has_transform:
            return batch
        rows = batch.chunk.frame
        ids = rows["event_id"].to_pylist()
        at_fault = {id_of(one) for one in failed}
        left_out = at_fault | {id_of(one) for one in filtered}
        kept = rows.filter(pa.array([one not in left_out for one in ids], pa.bool_()))
        places = zip(ids, rows["offset"].to_pylist(), strict=True)
        failures = {(0, offset): "it fails" for event_id, offset in places if event_id in at_fault}
        return replace(batch, returned=Returned(kept, failures))

    @contextmanager
    def running(self) -> Iterator[PostgresWriter]:
        with closing(connect(self.settings, SinkRole.WRITER)) as connection:
            writer = PostgresWriter(connection, self.spec, fetch)
            if self.has_transform:
                writer.prepare(self.spec.layout.schema)
            yield writer

    def replay(self) -> Replayed:
        with closing(connect(self.settings, SinkRole.WRITER)) as connection:
            chosen = Selection(sink=self.spec.name).choose(connection, with_parked=True)
            return replay.replay(connection, {self.spec.name: self.spec}, chosen, applier_of=self._applier)[
                self.spec.name
            ]

    def discard(self, *records: Record) -> None:
        wanted = Selection(identities=[*map(id_of, records)])
        assert Database(self.settings, self.spec.name).discard(wanted) == len(records)

    def query(self, query: str) -> dict[str, dict[str, Any]]:
        """By id the properties of the events that a query returns."""
        events = [event for (event,) in self.seen.query(query) if isinstance(event, dict)]
        return {event["event_id"]: {name: event[name] for name in self.kinds} for event in events}

    def _applier(self, spec: SinkSpec) -> PostgresApplier:
        if not self.has_transform:
            return PostgresApplier(spec)
        columns = columns_of(spec.layout.schema, spec.layout)
        return TransformingApplier(spec, columns, lambda _, rows: Returned(rows))


def id_of(one: Record) -> str:
    return (dict(one.headers)["id"] or b"").decode()


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
    """Events are applied, refused, parked, filtered, discarded, replayed and delivered again."""
    names = Names(tables, tmp_path, by, turn)
    first = [names.event(1, 1), names.event(1, 2), names.event(2, 1), names.event(3, 1), names.event(4, 1)]
    second = [names.event(1, 3), names.event(2, 2)]
    bad = names.event(2, 3)._replace(value=b"{")
    third = [bad, names.event(2, 4), names.event(5, 1)]
    names.seen.refuse(id_of(first[1]))
    with names.running() as writer:
        batch = names.passed(names.batch(*first), filtered=first[3:4], failed=first[4:])
        due = Counts(5, 2, rejected=2, filtered=1) if names.has_transform else Counts(5, 4, rejected=1)
        assert writer.apply(batch) == due
        assert writer.apply(names.passed(names.batch(*second))) == Counts(2, 1, rejected=1)
        assert writer.apply(names.passed(names.batch(*third))) == Counts(2, 1, rejected=1, dead=1)
        names.seen.refuse()
        names.discard(bad)
        assert names.replay() == Replayed(applied=4 if names.has_transform else 3)
        if by != "naive":
            assert writer.apply(batch).applied == 0
    left_out = {id_of(bad), *([id_of(first[3])] if names.has_transform else [])}
    sent = {id_of(one): json.loads(one.value or b"") for one in [*first, *second, *third] if id_of(one) not in left_out}
    assert names.query("SELECT event FROM seen ORDER BY line") == sent
    if by == "merge" and not names.has_transform:
        assert names.query("SELECT event FROM landed_events") == sent


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
        with one.running() as writer:
            assert writer.apply(one.passed(one.batch(one.event(1, 1)))).applied == 1
        assert sorted(one.seen.query("SELECT sink FROM seen")) == [(name,) for name in names for _ in range(turn + 1)]
