"""Deliver events to a sink as its driver does, without Kafka; without Spark, unless its job has a transform. And read
the result: rows of its tables, open dead letters, and what a target's function has written.

All of it is emptied between deliveries: a new pair of databases takes 0.3 s, emptying one takes 0.01 s, and a test
delivers some hundred times.

Compared are all tables of the sink database but the machinery's own and those in which the sink's strategy remembers
events. Of a table with a column ``sink`` it is the sink's rows; of a table without, all rows. A column whose default is
the time (`DEFAULT now()`) says when a row was written and is left out.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from decimal import Decimal
from typing import Any, NamedTuple

from psycopg2 import extensions, sql

from outbox.base.database import Row, connect
from outbox.base.settings import Settings, SinkRole
from outbox.events.schema import Rejection
from outbox.kafka.topics import Topic
from outbox.sink.applying.function import FunctionTarget
from outbox.sink.decoding.decoder import Skipped
from outbox.sink.decoding.records import DeadRecord, Place, Record
from outbox.sink.remembering.strategy import Strategy
from outbox.sink.repair import rebuild, replay
from outbox.sink.repair.replay import Selection
from outbox.sink.spec import SinkSpec, Transformed
from outbox.sink.writer import Applier
from outbox_lab.testing.contract.events import Sent
from outbox_lab.testing.fixtures.spark import running
from outbox_lab.testing.sinks import TOPIC_ID, Driver

# Tables of outbox/migrations/sink, also those without a column sink; a test holds that these are all.
MACHINERY = {
    *("applied_versions", "base_versions", "checkpoint_generations", "dead_letters", "dedup_horizon", "erased_keys"),
    *("key_versions", "landed_events", "outbox_sink_version", "positions", "processed_changes", "processed_events"),
    *("sinks", "skipped_events"),
}
ICEBERG = {"iceberg_namespace_properties", "iceberg_tables"}  # of `outbox.migrations.make_iceberg_catalog`
LETTERS = "dead_letters"
EMPTIED = """
SELECT relname, relkind = 'S' FROM pg_class
 WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p', 'S') AND NOT relispartition
"""
TABLES = """
SELECT relname,
       coalesce(array_agg(name ORDER BY attnum) FILTER (WHERE NOT is_time AND name <> 'sink'), '{}'),
       coalesce(array_agg(name ORDER BY attnum) FILTER (WHERE is_key AND name <> 'sink'), '{}'),
       bool_or(name = 'sink')
  FROM (SELECT relname, attnum, attname::text AS name,
               coalesce(pg_get_expr(adbin, adrelid), '') ~* %(time)s AS is_time,
               coalesce(attnum = ANY(indkey::int2[]), false) AS is_key
          FROM pg_class JOIN pg_attribute ON attrelid = pg_class.oid AND attnum > 0 AND NOT attisdropped
          LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
          LEFT JOIN pg_index ON indrelid = attrelid AND indisprimary
         WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p') AND NOT relispartition) AS columns
 GROUP BY relname
"""
TIME = r"\m(now|current_timestamp|current_date|localtimestamp|\w+_timestamp)\M"
OPEN_LETTERS = "SELECT identity, reason FROM public.dead_letters WHERE sink = %s AND status = 'open'"


class Database:
    """The sink database, to which nobody else connects.

    Tables that have rows after the migration (lookup tables, the machinery's own) are left as they are.
    """

    def __init__(self, settings: Settings, owner: extensions.connection) -> None:
        """``owner`` is a connection of the owner's role."""
        self.settings, self.owner = settings, owner
        with owner, owner.cursor() as cursor:
            cursor.execute(EMPTIED)
            found = cursor.fetchall()
            tables = [name for name, is_sequence in found if not is_sequence]
            kept = _with_rows(cursor, tables)
        self._emptied = [name for name in tables if name not in kept]
        self._restarts = [
            sql.SQL("ALTER SEQUENCE {} RESTART").format(_public(name)) for name, is_sequence in found if is_sequence
        ]

    def reset(self) -> None:
        """Empty it. An empty table is left alone, because to truncate it would take as long as one with rows."""
        with self.owner, self.owner.cursor() as cursor:
            filled = _with_rows(cursor, self._emptied)
            if filled:
                # CASCADE, because Postgres refuses to truncate a table alone if another one refers to it.
                cursor.execute(sql.SQL("TRUNCATE {} CASCADE").format(sql.SQL(", ").join(map(_public, filled))))
            for restart in self._restarts:
                cursor.execute(restart)


def _with_rows(cursor: extensions.cursor, tables: Iterable[str]) -> set[str]:
    """The tables that have rows."""
    one = sql.SQL("SELECT {} WHERE EXISTS (SELECT FROM {})")
    cursor.execute(sql.SQL(" UNION ALL ").join(one.format(sql.Literal(name), _public(name)) for name in tables))
    return {name for (name,) in cursor.fetchall()}


def _public(name: str) -> sql.Identifier:
    return sql.Identifier("public", name)


class Table(NamedTuple):
    """A table that is compared: its columns, and those of them that are its key."""

    name: str
    columns: Sequence[str]
    key: Sequence[str]
    has_sink: bool


class RowPlace(NamedTuple):
    """Where a row is: its table, and its key as text; of a table without a key it is the whole row, and its number
    among equal ones.
    """

    table: str
    key: str


class Difference(NamedTuple):
    """The first row in which two results differ."""

    place: RowPlace
    was: Row | None
    now: Row | None

    def __str__(self) -> str:
        where = f"table {self.place.table}, row {self.place.key}"
        if self.was is None:
            return f"{where}: there is no such row in the reference, here it is {_shown(self.now)}"
        if self.now is None:
            return f"{where}: in the reference it is {_shown(self.was)}, here there is no such row"
        columns = [name for name in self.was if self.was[name] != self.now[name]]
        values = (f"{name} is {_text(self.was[name])} in the reference and {_text(self.now[name])} here"
                  for name in columns)  # fmt: skip
        return f"{where}: {'; '.join(values)}"


Result = Mapping[RowPlace, Row]


class Reader:
    """Reads the results of sinks with one strategy."""

    def __init__(self, connection: extensions.connection, strategy: Strategy) -> None:
        """``connection`` may read all tables of the project."""
        self._connection = connection
        remembering = strategy.select + strategy.remember
        with connection, connection.cursor() as cursor:
            cursor.execute(TABLES, {"time": TIME})
            tables = [Table(*row) for row in cursor if row[0] not in MACHINERY | ICEBERG]
        self.tables = [table for table in tables if not re.search(rf"\b{table.name}\b", remembering)]

    def read(self, sink: str) -> Result:
        """The result of a sink."""
        found: dict[RowPlace, Row] = {}
        with self._connection, self._connection.cursor() as cursor:
            for table in self.tables:
                found |= _rows(cursor, table, sink)
            cursor.execute(OPEN_LETTERS, [sink])
            for identity, reason in cursor:
                found[RowPlace(LETTERS, f"event {identity}")] = {"reason": reason}
        return found


class FunctionPlace:
    """The place that a target's function writes to: read by ``totals``, and emptied by ``erase``, key by key.

    So a test never removes more than it has delivered. A place that is not empty at the start fails the test.
    """

    def __init__(self, settings: Settings, spec: SinkSpec, target: FunctionTarget) -> None:
        self._settings, self._spec, self._target = settings, spec, target

    def empty(self, delivered: Collection[tuple[str, str]]) -> None:
        """Erase these keys, each with its topic. Raises AssertionError if there is anything else."""
        for topic, key in delivered:
            self._target.erase(self._settings, self._spec, topic, key, dry_run=False)
        for key, *_ in self._target.totals(self._spec):
            raise AssertionError(
                f"sink {self._spec.name}: the place of {self._target.name} is not empty, it has the key {key}\n"
                "Usually: the test needs a place of its own; or the function erase leaves rows of a key."
            )

    def read(self) -> Result:
        """The totals by key."""
        found: dict[RowPlace, dict[str, Any]] = {}
        for key, total, version in self._target.totals(self._spec):
            place = RowPlace(f"totals of {self._target.name}", f"key {key}")
            row = found.setdefault(place, {"total": Decimal(0), "version": None})
            row["total"] += total
            row["version"] = version if row["version"] is None else max(version, row["version"])
        return found


def difference(reference: Result, found: Result) -> Difference | None:
    """The first difference of two results; None if they are equal."""
    for place in sorted(reference.keys() | found.keys()):
        was, now = reference.get(place), found.get(place)
        if was != now:
            return Difference(place, was, now)
    return None


def _rows(cursor: extensions.cursor, table: Table, sink: str) -> dict[RowPlace, Row]:
    query = sql.SQL("SELECT to_jsonb(one.*)::text FROM {} AS one").format(_public(table.name))
    if table.has_sink:
        query += sql.SQL(" WHERE sink = {}").format(sql.Literal(sink))
    cursor.execute(query)
    found: dict[RowPlace, Row] = {}
    equal = Counter[str]()
    for (text,) in cursor:
        whole = json.loads(text, parse_float=Decimal)
        row = {name: whole[name] for name in table.columns}
        key = ", ".join(f"{name} {_text(row[name])}" for name in table.key if name in row)
        if not key:
            key = _shown(row)
            equal[key] += 1
            key += f", number {equal[key]}"
        found[RowPlace(table.name, key)] = row
    return found


def _shown(row: Row | None) -> str:
    return ", ".join(f"{name} {_text(value)}" for name, value in (row or {}).items())


def _text(value: Any) -> str:
    return str(value) if isinstance(value, str | Decimal) else json.dumps(value, default=str)


SET_ASIDE = "set aside by the contract test"
REJECTION = Rejection(SET_ASIDE, SET_ASIDE)


class Placed(NamedTuple):
    """An event at a place of its topic."""

    sent: Sent
    partition: int
    offset: int


class Delivery:
    """Deliveries to one sink, each of which begins where the last has ended."""

    def __init__(self, database: Database, spec: SinkSpec, transform: Transformed | None = None) -> None:
        self._database, self._spec, self._transform = database, spec, transform
        self._driver = Driver(database.settings, spec, transform)
        self.close = self._driver.close

    def apply(self, placed: Sequence[Placed], set_aside: Collection[str] = ()) -> None:
        """Apply events as one batch of each of their topics. Those whose ids are ``set_aside`` become dead letters, as
        if the sink could not read their records; but an event that it has not asked for is passed.

        Raises Failure if the sink refuses a batch.
        """
        for topic in dict.fromkeys(one.sent.topic for one in placed):
            decoder, records, dead = self._spec.decoders[topic], dict[Place, Record](), list[DeadRecord]()
            for one in (one for one in placed if one.sent.topic == topic):
                record, event_id = one.sent.record, one.sent.event_id
                if event_id in set_aside and not isinstance(decoder.record(record), Skipped):
                    dead.append(DeadRecord(one.partition, one.offset, record, event_id, REJECTION))
                else:
                    records[one.partition, one.offset] = record
            self._driver.apply(topic, records, dead)

    def replay(self) -> None:
        """Replay what was set aside, as `outbox dead-letters replay` does."""
        self.close()
        with closing(connect(self._database.settings, SinkRole.WRITER)) as connection:
            chosen = Selection(sink=self._spec.name, reason=SET_ASIDE).choose(connection, with_parked=True)
            replay.replay(connection, {self._spec.name: self._spec}, chosen, applier_of=self._applier)

    def rebuild(self, placed: Sequence[Placed]) -> None:
        """Recompute the sink from its topics, which have these events, as `outbox rebuild --from topic` does."""
        self.close()
        topics = [Topic(name, TOPIC_ID, 1) for name in self._spec.topics]
        first = {topic.name: {0: 0} for topic in topics}
        with rebuild.reserved(self._database.settings, self._spec.name) as connection:
            rebuild.begin(connection, self._spec.name, topics, first)
            copy = replace(self._spec, name=rebuild.copy_of(self._spec.name))
            with closing(Delivery(self._database, copy, self._transform)) as to_copy:
                to_copy.apply(placed)
            rebuild.swap(connection, self._spec.name, topics, first)

    def _applier(self, spec: SinkSpec) -> Applier:
        return spec.target.applier(self._database.settings, spec, self._transform)


def placed(
    sent: Sequence[Sent], first: Mapping[str, int] | int = 0, *, step: int = 1, partition: int = 0
) -> list[Placed]:
    """Events one after the other on their topics, from an offset on."""
    next_: dict[str, int] = {}
    found = list[Placed]()
    for one in sent:
        offset = next_.setdefault(one.topic, first if isinstance(first, int) else first.get(one.topic, 0))
        found.append(Placed(one, partition, offset))
        next_[one.topic] = offset + step
    return found


def after(events: Sequence[Placed]) -> dict[str, int]:
    """By topic the offset behind these."""
    found: dict[str, int] = {}
    for one in events:
        found[one.sent.topic] = max(found.get(one.sent.topic, 0), one.offset + 1)
    return found


@contextmanager
def transformed(spec: SinkSpec, database: Database) -> Iterator[Transformed]:
    """The transform of a job, in a Spark session until the end of the block. Raises Failure if it cannot be used."""
    from outbox.sink.spark.transform import Transform  # only jobs with a transform need Spark

    with running(database.settings, [spec.target]) as spark:
        yield Transform(spark, spec).transformed
