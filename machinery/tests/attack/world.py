"""The real sink on a real Postgres, driven without Kafka, Spark or a JVM: the topic is a list.

All contact with the code under test is in this file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import psycopg2
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import note
from psycopg2 import extensions

from outbox.audit import declared, sinks
from outbox.audit.comparison import Observed, compare
from outbox.audit.report import SinkReport
from outbox.audit.rows import SOURCE, load_rows
from outbox.audit.source import Source, Written
from outbox.audit.store import TopicLogs
from outbox.base.database import connect, query
from outbox.base.errors import Failure
from outbox.base.settings import Role, Settings, SinkRole, SourceRole
from outbox.events import catalog
from outbox.events.catalog import Catalog
from outbox.kafka import topics
from outbox.kafka.topics import Topic
from outbox.maintenance import retention
from outbox.relay import connectors
from outbox.sink import comparison_files, discovery
from outbox.sink.applying.postgres.target import PostgresTarget
from outbox.sink.decoding import dead_records, decoder, records
from outbox.sink.decoding.batch import Batch, Returned
from outbox.sink.decoding.records import Place
from outbox.sink.remembering import fence
from outbox.sink.repair import rebuild, replay, rewind
from outbox.sink.repair.replay import Selection
from outbox.sink.repair.rewind import Moves
from outbox.sink.spec import SinkSpec, Transformed
from outbox.sink.writer import Counts, SinkWriter
from tests.attack.model import Event, Job, Record, real_id
from tests.support.declared import Events, payload
from tests.support.declared_sinks import sink as sink_of
from tests.support.made_events import DAY_MS, NOW_MS, as_read

NAME = "orders"
TOPIC = "shop.order"
QUANTITIES = {"quantity": {"type": "integer"}, "total": {"type": "integer"}}
NOTE = {"note": {"type": "string"}}
UNIT = {"unit": {"type": "string"}}
TOML = 'key = "id"\nversion = "number"\nsource = "source_books"\n'
UPCAST = 'def placed_v1(payload):\n    return {**payload, "unit": "PCE"}\n'
NAIVE = Path(__file__).parents[1] / "domain" / "stock" / "sinks" / "naive" / "strategies" / "naive.sql"

SINK_TABLES = """
DROP VIEW sink_totals;
CREATE TABLE book (sink text, key text, total numeric NOT NULL, version bigint NOT NULL, PRIMARY KEY (sink, key));
CREATE TABLE trail (sink text, event_id uuid);
CREATE TABLE unwelcome (event_id uuid);
CREATE VIEW sink_totals AS SELECT sink, key, total, version FROM book;
GRANT SELECT, INSERT, UPDATE ON book, trail, unwelcome TO {writer};
GRANT SELECT ON sink_totals TO {writer}, {auditor};
"""
SOURCE_TABLES = """
CREATE TABLE books (key text PRIMARY KEY, total numeric NOT NULL, version bigint NOT NULL);
CREATE VIEW source_books AS SELECT key, total, version FROM books;
GRANT SELECT ON source_books TO {auditor};
"""
REFUSE = """
-- [refuse]
INSERT INTO rejections (event_id, reason, detail)
SELECT event_id, 'unwelcome', 'as yet' FROM new_events WHERE event_id IN (SELECT event_id FROM unwelcome);
-- [apply]
INSERT INTO trail (sink, event_id) SELECT %(sink)s, event_id FROM new_events;
"""
SUMS = """
INSERT INTO book AS stored (sink, key, total, version)
SELECT %(sink)s, id, sum(quantity), max(number) FROM new_events GROUP BY id ORDER BY id
ON CONFLICT (sink, key) DO UPDATE
   SET total = stored.total + excluded.total, version = greatest(stored.version, excluded.version);
"""
STATES = """
INSERT INTO book AS stored (sink, key, total, version)
SELECT DISTINCT ON (id) %(sink)s, id, total, number FROM new_events ORDER BY id, number DESC
ON CONFLICT (sink, key) DO UPDATE SET total = excluded.total, version = excluded.version
 WHERE excluded.version > stored.version;
"""
REBUILD = """
WITH truth AS (
    SELECT total ->> 'key' AS key, (total ->> 'total')::numeric AS total, (total ->> 'version')::bigint AS version
      FROM source
), before AS (
    SELECT key, total AS former FROM book WHERE sink = %(sink)s
), settled AS (
    INSERT INTO book AS stored (sink, key, total, version)
    SELECT %(sink)s, key, total, version FROM truth ORDER BY key
    ON CONFLICT (sink, key) DO UPDATE SET total = excluded.total, version = excluded.version
    RETURNING key, total
), unknown AS (
    UPDATE book AS stored SET total = 0
     WHERE sink = %(sink)s AND NOT EXISTS (SELECT FROM truth WHERE truth.key = stored.key)
    RETURNING key, total
)
SELECT key, total - coalesce(former, 0) AS difference
  FROM (TABLE settled UNION ALL TABLE unknown) AS changed LEFT JOIN before USING (key)
 WHERE total <> coalesce(former, 0);
"""
COMPARISON = """
-- adds: quantity
-- [source]
SELECT key, total FROM source_books
-- [sink]
SELECT sink, key, total, version FROM sink_totals
"""
STATE = """
SELECT json_build_object(
    'letters', (SELECT json_object_agg(identity, json_build_array(status, is_event, reason))
                  FROM dead_letters WHERE sink = %(sink)s),
    'trail', (SELECT json_object_agg(event_id, count)
                FROM (SELECT event_id, count(*) FROM trail WHERE sink = %(sink)s GROUP BY 1) AS counted),
    'book', (SELECT json_object_agg(key, json_build_array(total::text, version)) FROM book WHERE sink = %(sink)s),
    'bases', (SELECT json_object_agg(key, version) FROM base_versions WHERE sink = %(sink)s),
    'skipped', (SELECT json_agg(event ORDER BY event) FROM skipped_events WHERE sink = %(sink)s),
    'dedup', (SELECT json_agg(event_id) FROM processed_events WHERE sink = %(sink)s),
    'merge', (SELECT json_agg(event_id) FROM landed_events WHERE sink = %(sink)s),
    'versions', (SELECT json_agg(json_build_array(key, version))
                   FROM applied_versions, unnest(versions) AS span,
                        generate_series(lower(span), upper(span) - 1) AS version
                  WHERE sink = %(sink)s),
    'highest', (SELECT json_object_agg(key, version) FROM key_versions WHERE sink = %(sink)s),
    'position', (SELECT next_offset FROM positions WHERE sink = %(sink)s),
    'applied', (SELECT applied FROM sinks WHERE name = %(sink)s))::text
"""


class Pooled(extensions.connection):
    """A connection that is used again after its end, as if it were another: a login takes longer than all the rest."""

    idle: list[Pooled] | None = None
    is_idle = False

    def close(self) -> None:
        if self.closed or self.is_idle or self.idle is None:
            return
        self.is_idle = True
        self.rollback()
        self.set_session(isolation_level="default", readonly="default", autocommit=True)
        with self.cursor() as cursor:
            cursor.execute("DISCARD ALL")
        self.autocommit = False
        self.idle.append(self)


class State(NamedTuple):
    letters: Mapping[str, tuple[str, bool, str]]
    trail: Mapping[str, int]
    book: Mapping[str, tuple[int, int]]
    bases: Mapping[str, int]
    skipped: frozenset[str]
    ids: Mapping[str, set[str]]
    versions: set[tuple[str, int]]
    highest: Mapping[str, int]
    position: int | None
    applied: int


@dataclass
class TopicList:
    """The topic. Record n is at offset n; those before ``first`` are dropped."""

    number: int
    records: list[records.Record]
    first: int = 0
    arrived: list[int] = field(default_factory=list)  # after how many agings

    @property
    def id(self) -> str:
        return f"topic-{self.number}"


def attempt(do: Callable[[], Any]) -> tuple[Any, str]:
    """The returned value, or the code of the Failure."""
    try:
        return do(), ""
    except Failure as failure:
        note(str(failure))
        return None, failure.code


class World:
    """A sink, its topic and its source, all empty at the beginning of an example."""

    def __init__(self, settings: Settings, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.settings = settings
        self._folder = folder
        self._catalogs: dict[frozenset[str], Catalog] = {}
        self._idle: dict[str, list[Pooled]] = {}
        self.now_ms = NOW_MS
        self._patch(patch)
        owners: dict[str, Role] = {
            settings.sink_db_url.name: SinkRole.OWNER,
            settings.source_db_url.name: SourceRole.OWNER,
        }
        for name, owner in owners.items():
            _execute(settings, owner, f"ALTER DATABASE {name} SET synchronous_commit = off")  # no crash is tried here
            # As the sink sets it: a session that is used again may not change it any more.
            _execute(settings, owner, f"ALTER DATABASE {name} SET temp_buffers = '64MB'")
        _execute(settings, SinkRole.OWNER, SINK_TABLES)
        _execute(settings, SourceRole.OWNER, SOURCE_TABLES)
        self._owner = connect(settings, SinkRole.OWNER)
        self._owner.autocommit = True
        self._sources = connect(settings, SourceRole.OWNER)
        self._sources.autocommit = True
        for ordered in (False, True):
            self._write_projections(ordered)
        self._opened = ExitStack()
        self.begin(Job(("order",), frozenset(), "dedup"), is_ordered=False, has_transform=False)

    def close(self) -> None:
        self._opened.close()
        for one in (self._owner, self._sources, *(one for idle in self._idle.values() for one in idle)):
            extensions.connection.close(one)

    def _patch(self, patch: pytest.MonkeyPatch) -> None:
        """Let the code under test find our topic, our job and our connections."""
        patch.setattr(psycopg2, "connect", self._connect)
        patch.setattr(fence, "GRACE_S", 0.01)
        patch.setattr(catalog, "of_project", lambda _: self.catalog)
        patch.setattr(discovery, "jobs", lambda _: [self.spec.job])
        patch.setattr(retention, "event_topics", lambda _: [TOPIC])
        patch.setattr(connectors, "others", lambda _: [])
        patch.setattr(decoder, "now_ms", lambda: self.now_ms)
        patch.setattr(topics, "describe", lambda *_: self.described)
        patch.setattr(topics, "first_offsets", lambda *_: {0: self.topic.first})

    def _connect(self, dsn: str, login: Any = psycopg2.connect) -> extensions.connection:
        idle = self._idle.setdefault(dsn, [])
        while idle:
            found = idle.pop()
            if not found.closed:
                found.is_idle = False
                return found
        made: Pooled = login(dsn, connection_factory=Pooled)
        made.idle = idle
        return made

    def _write_projections(self, ordered: bool) -> None:
        home = self._folder / ("ordered" if ordered else "unordered")
        for folder in (home / "projections", home / "comparisons"):
            folder.mkdir(parents=True)
        header = "-- ordered\n" if ordered else ""
        (home / "projections" / "book.sql").write_text(header + REFUSE + SUMS)
        (home / "projections" / "book.states.sql").write_text(header + REFUSE + STATES)
        (home / "projections" / "book.rebuild.sql").write_text(REBUILD)
        (home / "comparisons" / "book.sql").write_text(COMPARISON)

    def begin(self, job: Job, *, is_ordered: bool, has_transform: bool) -> None:
        """Forget everything, and begin with this job."""
        self._opened.close()
        self._opened = ExitStack()
        self.driver: SinkWriter | None = None
        self._driver_connection: extensions.connection | None = None
        self.topic = TopicList(1, [])
        self._is_ordered, self._has_transform = is_ordered, has_transform
        self.filtered: Collection[str] = ()
        self.failing: Collection[str] = ()
        self._checkpoints: dict[tuple[str, int], int] = {}
        self._agings = 0
        with self._owner.cursor() as cursor:
            for table in (*self._sink_tables(cursor), "sinks", "unwelcome"):
                cursor.execute(f"DELETE FROM {table}")
            cursor.execute("UPDATE dedup_horizon SET horizon = '00000000-0000-0000-0000-000000000000'")
        self.deploy(job)

    def _sink_tables(self, cursor: extensions.cursor) -> list[str]:
        if not hasattr(self, "_tables"):
            cursor.execute(rebuild.TABLES, ("",))
            self._tables = [name for (name,) in cursor.fetchall()]
        return self._tables

    def set_clock(self, days_ago: int) -> str:
        """Let the present be so many days ago. Returns the greatest id that is not from the future."""
        self.now_ms = NOW_MS - days_ago * DAY_MS
        return real_id(0, days_ago - 1)

    # What is declared and deployed --------------------------------------------------------------------------------

    def deploy(self, job: Job) -> None:
        """Deploy a job. The driver is still to be stopped and started."""
        self.job = job
        self.catalog = self._catalog(job.declared)
        folder = self._folder / ("ordered" if self._is_ordered else "unordered") / "projections"
        by = NAIVE if job.strategy == "naive" else job.strategy
        found = sink_of(self.catalog, *job.names, projections=folder, name=NAME, by=by)
        transform = "tests.attack.world:transform" if self._has_transform else None
        self.spec = replace(found, job=replace(found.job, transform=transform))

    def _catalog(self, declared: frozenset[str]) -> Catalog:
        if declared not in self._catalogs:
            events = Events(self._folder / "events" / "-".join(["with", *sorted(declared)]))
            optional = NOTE if "note" in declared else {}
            required = tuple(QUANTITIES)
            schemas = {
                "placed_v1": payload(QUANTITIES | optional, required),
                "cancelled_v1": payload(QUANTITIES, required),
            }
            if "v2" in declared:
                schemas["placed_v2"] = payload(QUANTITIES | optional | UNIT, (*required, "unit"))
                events.write("order/upcast.py", UPCAST)
            if "paid" in declared:
                schemas["paid_v1"] = payload(QUANTITIES, required)
            self._catalogs[declared] = events.aggregate("order", TOML, **schemas).load()
        return self._catalogs[declared]

    @property
    def described(self) -> Topic:
        return Topic(TOPIC, self.topic.id, 1)

    @property
    def first(self) -> dict[str, dict[int, int]]:
        return {TOPIC: {0: self.topic.first}}

    # The topic ----------------------------------------------------------------------------------------------------

    def publish(self, record: Record) -> Record:
        """Add a record to the topic. Returns it with its identity."""
        made = _record(record, self.now_ms)
        self.topic.records.append(made)
        self.topic.arrived.append(self._agings)
        if record.flaw == "missing id":
            return record._replace(identity=dead_records.identity(made, None))
        return record

    # The driver ---------------------------------------------------------------------------------------------------

    def start(self) -> int:
        """Start the driver as a process does, and return where it reads on. Raises Failure if it does not start."""
        connection = self._opened.enter_context(closing(connect(self.settings, SinkRole.WRITER)))
        try:
            writer = self._writer(connection, self.spec)
            self.next = self._beginning(writer, self.spec)
        except BaseException:
            connection.close()
            raise
        self.driver, self._driver_connection, self._running = writer, connection, self.spec
        return self.next

    def _writer(self, connection: extensions.connection, spec: SinkSpec) -> SinkWriter:
        writer = PostgresTarget().writer(self.settings, connection, spec, self._fetch)
        if self._has_transform:
            writer.prepare(spec.layout.schema)
        return writer

    def _fetch(self, _: str, places: Collection[Place]) -> list[tuple[Place, records.Record]]:
        return [((partition, offset), self.topic.records[offset]) for partition, offset in places]

    def _beginning(self, writer: SinkWriter, spec: SinkSpec) -> int:
        """Where a stream begins, as `outbox.sink.running.stream` does it."""
        beginning = writer.beginning()
        stored = writer.positions(TOPIC, self.topic.id)
        kept = self._checkpoints.get((writer.name, beginning.generation))
        reached = self._reached(writer, stored) if stored else self.topic.first
        writer.begin()
        if kept is not None and stored and kept <= stored[0]:
            return max(kept, reached)
        if not stored:
            writer.begin_at({TOPIC: {0: self.topic.first}}, {TOPIC: self.topic.id})
        begin = self.topic.first if spec.strategy.start == "earliest" and kept is None else reached
        set_to = beginning.offsets.get(TOPIC, {}).get(0)
        return begin if set_to is None else max(self.topic.first, min(set_to, reached))

    def _reached(self, writer: SinkWriter, stored: Mapping[int, int]) -> int:
        from outbox.sink.remembering import positions

        positions.require_no_gap(writer.name, TOPIC, stored, {0: self.topic.first})
        return max(stored[0], self.topic.first)

    def stop(self) -> None:
        if self._driver_connection is not None:
            self._driver_connection.close()
        self.driver = self._driver_connection = None

    def lose_commit(self, back: int) -> None:
        """Let the checkpoint be as so many records before: the process died between the two commits."""
        assert self.driver is not None
        key = (NAME, self.driver.beginning().generation)
        self._checkpoints[key] = max(self.topic.first, self.next - back)

    def apply(self, count: int) -> Counts:
        """Apply the next batch, and let the checkpoint know."""
        assert self.driver is not None
        end = min(self.next + count, len(self.topic.records))
        found = self._apply(self.driver, self._running, self.next, end)
        self.next = end
        self._checkpoints[NAME, self.driver.beginning().generation] = end
        return found

    def _apply(self, writer: SinkWriter, spec: SinkSpec, start: int, end: int) -> Counts:
        read = as_read(*self.topic.records[start:end], partition=0, start=start)
        chunk = spec.chunking(TOPIC).chunk(read)
        batch = Batch(TOPIC, self.topic.id, {0: start}, {0: end}, chunk)
        if self._has_transform and chunk.events is not None:
            batch = replace(batch, returned=self._transform(TOPIC, chunk.events))
        return writer.apply(batch)

    def _transform(self, _: str, rows: pa.Table) -> Returned:
        """The transform of the sink: it leaves out some events, and fails for others."""
        failing = rows.filter(pc.is_in(rows["event_id"], pa.array([*self.failing], pa.string())))
        failed = dict.fromkeys(
            zip(failing["partition"].to_pylist(), failing["offset"].to_pylist(), strict=True), "it fails"
        )
        gone = pa.array([*self.filtered, *self.failing], pa.string())
        kept = rows.filter(pc.invert(pc.is_in(rows["event_id"], gone)))
        return Returned(kept, failed)

    def second_driver(self) -> None:
        """Start another driver beside the one that runs."""
        with closing(connect(self.settings, SinkRole.WRITER)) as connection:
            self._writer(connection, self.spec)

    def usurp(self) -> tuple[int, str]:
        """Let another driver take the sink over; returns where it begins, and what the former one fails with."""
        assert self.driver is not None
        assert self._driver_connection is not None
        former, held, was_next, spec = self.driver, self._driver_connection, self.next, self._running
        held.rollback()
        with held, held.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_unlock_all()")  # a pooler gave its session away
        begin = self.start()
        end = min(was_next + 1, len(self.topic.records))
        code = attempt(lambda: self._apply(former, spec, was_next, end))[1] if was_next < end else "sink-fenced"
        held.close()
        return begin, code

    # Repairs ------------------------------------------------------------------------------------------------------

    def refuse(self, event_ids: Iterable[str]) -> None:
        """From now on the projection refuses exactly these."""
        with self._owner.cursor() as cursor:
            cursor.execute("DELETE FROM unwelcome")
            cursor.execute("INSERT INTO unwelcome SELECT unnest(%s::uuid[])", ([*event_ids],))

    def replay(self, selection: Selection, *, is_older: bool = False) -> dict[str, int]:
        """Replay letters as the command does."""
        with closing(connect(self.settings, SinkRole.WRITER)) as connection:
            chosen = selection.choose(connection, with_parked=True)
            found = replay.replay(
                connection, {NAME: self.spec}, chosen, applier_of=self._applier, older_than_horizon=is_older
            )
            return found[NAME]._asdict() if NAME in found else {}

    def _applier(self, spec: SinkSpec) -> Any:
        transform = Transformed(spec.layout.schema, self._transform) if self._has_transform else None
        return spec.target.applier(self.settings, spec, transform)

    def discard(self, selection: Selection) -> int:
        """Discard letters as the command does."""
        with closing(connect(self.settings, SinkRole.WRITER)) as connection:
            chosen = selection.choose(connection)
            return replay.discard(connection, chosen, because="a test").get(NAME, 0)

    def plan(self, to: int | None) -> Moves:
        """Where a rewind would lead: to the positions, or to an offset, as that of a moment."""
        if to is None:
            return rewind.to_positions(self.settings, NAME)
        if to <= self.topic.first:
            return rewind.to_earliest(self.settings, NAME)
        return rewind.to_offsets(self.settings, NAME, {rewind.TopicPartition(TOPIC, 0): to})

    def give_up(self) -> None:
        """`outbox rewind --to-positions --skip-dropped`."""
        moves = rewind.skip_dropped(self.settings, NAME, rewind.to_positions(self.settings, NAME))
        rewind.rewind(self.settings, NAME, moves)

    def rewind(self, moves: Moves) -> None:
        """The work of a rewind once it is confirmed."""
        rewind.rewind(self.settings, NAME, moves)

    def recreate(self) -> None:
        self.topic = TopicList(self.topic.number + 1, [])

    def accept_recreated(self) -> None:
        """`outbox rewind --accept-recreated`."""
        rewind.accept_recreated(self.settings, NAME)

    def begin_copy(self) -> bool:
        """The first step of `outbox rebuild --from topic`; the command goes on until `swap` or `end_rebuild`."""
        with rebuild.reserved(self.settings, NAME) as owner:
            return rebuild.begin(owner, NAME, [self.described], self.first)

    def copy(self, count: int) -> tuple[int, Counts]:
        """Let the copy apply the next batch; its driver starts and stops. Returns where the batch begins, too."""
        spec = replace(self.spec, name=rebuild.copy_of(NAME))
        with closing(connect(self.settings, SinkRole.WRITER)) as connection:
            writer = self._writer(connection, spec)
            start = self._beginning(writer, spec)
            end = min(start + count, len(self.topic.records))
            found = self._apply(writer, spec, start, end)
            self._checkpoints[spec.name, writer.beginning().generation] = end
            return start, found

    def swap(self) -> None:
        """The last step."""
        with rebuild.reserved(self.settings, NAME) as owner:
            rebuild.swap(owner, NAME, [self.described], self.first)

    def drop_copy(self) -> bool:
        with rebuild.reserved(self.settings, NAME) as owner:
            return rebuild.drop_copy(owner, NAME)

    def rebuild_from_source(self, books: Mapping[str, tuple[int, int]]) -> None:
        """`outbox rebuild --from source`, of a source with these totals and versions by key."""
        self._write_books(books)
        rebuild.from_source(self.settings, self.spec, [self.described], self.first)

    def _write_books(self, books: Mapping[str, tuple[int, int]]) -> None:
        with self._sources.cursor() as cursor:
            cursor.execute("DELETE FROM books")
            for key, (total, version) in books.items():
                cursor.execute("INSERT INTO books VALUES (%s, %s, %s)", (key, total, version))

    # Check and retention ------------------------------------------------------------------------------------------

    def check(self, outbox: Sequence[Event], books: Mapping[str, tuple[int, int]]) -> tuple[SinkReport, list[str]]:
        """The report of `outbox check` on the sink for a given source, and the codes of all its findings."""
        known = declared.of_catalog(self.catalog, {NAME: self.spec}, {NAME: comparison_files.load(self.spec)})
        [topic], [comparison] = known.topics, known.all_comparisons
        kinds = {kind.row: number for number, kind in enumerate(known.kinds)}
        written = []
        for event in outbox:
            kind = kinds.get(("order", event.type, event.schema))
            numbers = [None if kind is None else str(event.quantity)] * len(topic.properties)
            made_ms = int(event.id.replace("-", "")[:12], 16)
            written.append(Written(topic.number, kind, event.id, event.key, event.version, made_ms, numbers))
        of_source = [("", key, version, str(total)) for key, (total, version) in books.items()]
        versions = {key: version for key, (_, version) in books.items()}
        with closing(TopicLogs(known.topics)) as logs:
            first, end = self.topic.first, len(self.topic.records)
            if end > first:
                logs.add(topic.number, as_read(*self.topic.records[first:], partition=0, start=first))
            logs.ends[topic.number].is_whole = not first
            logs.ends[topic.number].next_offsets = {0: end}
            logs.ends[topic.number].topic_id = self.topic.id
            of_sinks = sinks.read(self.settings, known, logs.store)
            load_rows(logs.store, SOURCE, [(comparison, of_source)])
            report = compare(Observed(known, of_sinks, logs, Source(written, {TOPIC: versions})), lambda _: None)
        [mine] = [one for one in report.sinks if one.name == NAME]
        return mine, [finding.code for finding in report.findings if finding.sink in (None, NAME)]

    def age(self) -> None:
        """Let nobody have seen the dead letters for long, nor the records."""
        self._agings += 1
        with self._owner.cursor() as cursor:
            cursor.execute("UPDATE dead_letters SET last_seen_at = last_seen_at - interval '100 days'")

    def retain(self, day: date) -> str:
        """Forget what is older than a day, as retention does when it has found out that; the horizon."""
        retention.drop(self.settings, day)
        with self._owner.cursor() as cursor:
            cursor.execute("SELECT horizon FROM dedup_horizon")
            ((horizon,),) = cursor.fetchall()
        retention.delete_rows(self.settings, UUID(horizon), keep_days=1, oldest=self._oldest)
        return str(horizon)

    def _oldest(self, *_: object) -> datetime | None:
        """When the oldest record of the topic has arrived."""
        left = self.topic.arrived[self.topic.first :]
        return datetime.now(UTC) - timedelta(days=100 * (self._agings - left[0])) if left else None

    # What there is -------------------------------------------------------------------------------------------------

    def state(self, sink: str = NAME) -> State:
        with self._owner.cursor() as cursor:
            cursor.execute(STATE, {"sink": sink})
            ((text,),) = cursor.fetchall()
        found = json.loads(text)
        return State(
            letters={name: tuple(letter) for name, letter in (found["letters"] or {}).items()},
            trail=found["trail"] or {},
            book={key: (int(total), version) for key, (total, version) in (found["book"] or {}).items()},
            bases=found["bases"] or {},
            skipped=frozenset(found["skipped"] or ()),
            ids={strategy: {*(found[strategy] or ())} for strategy in ("dedup", "merge")},
            versions={(key, version) for key, version in found["versions"] or ()},
            highest=found["highest"] or {},
            position=found["position"],
            applied=found["applied"] or 0,
        )


def _record(record: Record, recorded_ms: int) -> records.Record:
    event, flaw = record.event, record.flaw
    value: dict[str, Any] = {"id": event.key, "number": event.version, "quantity": event.quantity, "total": event.total}
    if event.schema == 2:
        value["unit"] = "KGM"
    if flaw == "schema violation":
        del value["quantity"]
    if flaw == "key mismatch":
        value["id"] = f"not {event.key}"
    headers = {"id": record.identity or event.id, "eventType": event.type, "schemaVersion": str(event.schema)}
    if flaw == "missing id":
        del headers["id"]
        value["of"] = event.id  # so that no two are alike
    content = b"{" if flaw == "not JSON" else json.dumps(value).encode()
    encoded = [(name, text.encode()) for name, text in headers.items()]
    return records.Record(event.key.encode(), encoded, content, recorded_ms)


def _execute(settings: Settings, owner: Role, statements: str) -> None:
    query(settings, owner, statements.format(**{role.value: settings.role_name(role) for role in type(owner)}))
