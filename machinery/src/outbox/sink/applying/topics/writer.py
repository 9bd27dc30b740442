"""A sink whose result is a topic: the records of a batch and its offsets are one Kafka transaction. Postgres keeps the
rest, in one transaction as for every sink. Kafka's is committed right before it.

If the process ends between the two commits, the topic has events that Postgres does not know, and the offsets of the
sink's group are beyond its positions. They have the topic's id beside them: offsets of an earlier topic of the name, or
of others, count for nothing. As long as the positions are behind the offsets, and while older events are read again,
events that the sink has written to its target already are remembered as any other, and are not written: each record has
its event's id. That holds however batches are cut, and whatever was set aside the first time.

A replay of dead letters looks for its events on the target likewise, and has a producer of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

from confluent_kafka import TopicPartition

from outbox.base.errors import Failure
from outbox.base.heavy import extensions, extras, sql
from outbox.base.settings import Settings
from outbox.events import catalog
from outbox.events.schema import shortened
from outbox.events.values import decode, encode
from outbox.kafka import records, topics
from outbox.kafka.transactions import Outgoing, Transactions
from outbox.sink.applying.handlers.handler import Event
from outbox.sink.applying.postgres.applier import PostgresApplier
from outbox.sink.applying.postgres.target import PostgresWriter
from outbox.sink.applying.postgres.transforming import TransformingApplier, columns_of
from outbox.sink.applying.topics import written
from outbox.sink.decoding.batch import Batch
from outbox.sink.decoding.binary import Encoded
from outbox.sink.decoding.layout import view_name
from outbox.sink.decoding.records import Fetch
from outbox.sink.remembering import fence
from outbox.sink.spec import SinkSpec, Transformed
from outbox.sink.writer import Applied, Counts

NOT_WRITABLE = "not writable"
IDLE_MAX_S = 1.0  # while functions are called, of the transaction
RECORD_EXTRA_BYTES = 200  # of a record in a batch of one, beside key, value and headers
TABLE = "CREATE TEMPORARY TABLE outbox_written (event_id uuid NOT NULL)"
INSERT_WRITTEN = "INSERT INTO pg_temp.outbox_written (event_id) VALUES %s"
# {key} and {version} are columns of the sink's table. The view of an event has its own, or those of a transform.
EVENTS = """
SELECT new.partition, new."offset", new.event_id::text, new.{{key}}::text, {version},
       (to_jsonb(one.*) - ARRAY['event_id', 'partition', 'offset'])::text
  FROM pg_temp.new_events AS new
  JOIN {view} AS one ON one.partition = new.partition AND one."offset" = new."offset"
 WHERE NOT EXISTS (SELECT FROM pg_temp.outbox_written AS known WHERE known.event_id = new.event_id)
"""
REJECT = "INSERT INTO pg_temp.rejections (event_id, reason, detail) VALUES %s"
OLDEST = """
SELECT min(letter.recorded_at), max(letter.first_seen_at), now() FROM public.dead_letters AS letter
  JOIN pg_temp.outbox_batch AS batch ON batch.event_id::text = letter.identity
 WHERE letter.sink = %s
"""

UTC = "+00:00"  # as Postgres writes it; schemas mostly want the other spelling

Function = Callable[[Event], Event | None]


class TopicApplier(PostgresApplier):
    """Makes a record of each new event: ``outgoing``, which the caller empties before a batch, and writes behind it."""

    def __init__(self, spec: SinkSpec, _: object = None) -> None:
        super().__init__(spec, ())
        self._is_ordered = any(decoder.version is not None for decoder in spec.decoders.values())
        self._views = {event: sql.Identifier("pg_temp", view_name(event)) for event in spec.layout.types}
        self._declared = dict[str, tuple[Collection[str], list[tuple[str, bytes]]]]()  # by type: optional, headers
        [self.target] = spec.target.topics
        self.outgoing = list[Outgoing]()
        self._found: tuple[datetime, datetime] | None = None  # by a replay: since when, and until when

    def open(self, settings: Settings, by: Function | None, suffix: str = "") -> None:
        """Begin to produce. Raises Failure if Kafka or the target topic is missing, or does not let us."""
        self._settings, self._by, self._catalog = settings, by, catalog.of_project(settings)
        if not topics.exists(settings, self.target):
            what = f"sink {self.name} writes to topic {self.target}, which does not exist"
            raise Failure(what, "create it, as docs/topics.md says", code="topic-missing")
        self._max_bytes = int(topics.config(settings, self.target)["max.message.bytes"])
        self.transactions = Transactions(settings, f"{settings.topic_prefix}.{self.name}{suffix}", self._max_bytes)

    def prepare(self, cursor: extensions.cursor) -> None:
        super().prepare(cursor)
        cursor.execute(TABLE)

    def renew(self, cursor: extensions.cursor) -> None:
        super().renew(cursor)
        cursor.execute("SELECT FROM pg_temp.outbox_written LIMIT 1")
        if not cursor.rowcount:
            cursor.execute("TRUNCATE pg_temp.outbox_written")

    def find_written(self, cursor: extensions.cursor, since: datetime | None) -> None:
        """Find the events that the sink has written since then, outside of a transaction: that may take long."""
        for some in written.read(self._settings, self.name, self.target, since):
            extras.execute_values(cursor, INSERT_WRITTEN, [(one.event_id,) for one in some], page_size=10_000)
            cursor.connection.commit()

    def replay(self, cursor: extensions.cursor, batch: Batch, fetch: Fetch, *, older_than_horizon: bool) -> Applied:
        self.take(cursor, self.rows(batch))
        cursor.execute(OLDEST, [self.name])
        [(since, seen_at, now)] = cursor.fetchall()
        with fence.between_transactions(cursor, self.name):
            if self._found is None or since < self._found[0] or seen_at > self._found[1]:
                self.find_written(cursor, since)
                self._found = since, now
        self.outgoing = []
        applied = super().replay(cursor, batch, fetch, older_than_horizon=older_than_horizon)
        self.transactions.commit(self.target, self.outgoing)
        return applied

    def _project(self, cursor: extensions.cursor, parameters: Mapping[str, Any]) -> bool:
        """Make the records. Events of which none can be made are set aside, and later ones of their keys wait."""
        problems = dict[str, str]()
        failed_at = dict[str, int]()  # by key the first version that has failed
        said_at = time.monotonic()
        for partition, offset, event in self._new(cursor, parameters):
            if time.monotonic() - said_at >= IDLE_MAX_S:
                cursor.execute("SELECT")  # Postgres ends a transaction that is idle for long
                said_at = time.monotonic()
            if event.version is not None and event.version > failed_at.get(event.key, event.version):
                continue
            origin = written.origin(self.name, parameters["topic"], partition, offset)
            try:
                record = self._record(event, origin)
            except Exception as error:  # of the function, or of what it returns
                said = type(error).__name__
                problems[event.id] = said if self._is_personal else shortened(f"{said}: {error}".partition("\n")[0])
                failed_at.setdefault(event.key, event.version or 0)
            else:
                self.outgoing += [] if record is None else [record]
        extras.execute_values(cursor, REJECT, [(one, NOT_WRITABLE, problem) for one, problem in problems.items()])
        return bool(problems)

    def _new(self, cursor: extensions.cursor, parameters: Mapping[str, Any]) -> list[tuple[int, int, Event]]:
        """The new events with their places, in the order of their topic."""
        found = list[tuple[int, int, Event]]()
        version = sql.SQL("new.{version}" if "version" in self._names[parameters["topic"]] else "NULL::bigint")
        for name, columns in self._decoders[parameters["topic"]].types.items():
            moments = [column.name for column in columns if column.type == "timestamptz"]
            statement = sql.SQL(EVENTS).format(view=self._views[name], version=version).as_string(cursor)
            self._execute(cursor, statement, parameters)
            for partition, offset, event_id, key, number, text in cursor:
                payload = decode(text.encode())
                for moment in moments:
                    if isinstance(said := payload.get(moment), str) and said.endswith(UTC):
                        payload[moment] = f"{said.removesuffix(UTC)}Z"
                found.append((partition, offset, Event(event_id, name, key, number, payload)))
        return sorted(found, key=lambda one: one[:2])

    def _record(self, event: Event, origin: bytes) -> Outgoing | None:
        """The record of an event, None if its function leaves it out. Raises any error if it has none."""
        made = event if self._by is None else self._by(event)
        if made is None:
            return None
        if made.type not in self._declared:
            [wanted, *others] = self._catalog.wanted([made.type])
            if others:
                raise ValueError(f"{made.type} stands for several events")
            schema = wanted.schema
            headers = [("eventType", schema.type.encode()), ("schemaVersion", str(schema.version).encode())]
            self._declared[made.type] = schema.properties.keys() - schema.required, headers
        optional, headers = self._declared[made.type]
        value = encode({name: one for name, one in made.payload.items() if one is not None or name not in optional})
        ours = [("id", event.id.encode()), *headers, (written.ORIGIN, origin)]
        record = Outgoing(made.key.encode(), value, ours)
        if (size := record.size_bytes + RECORD_EXTRA_BYTES) > self._max_bytes:
            raise ValueError(f"a record of {size} bytes, and the topic takes {self._max_bytes}")
        return record


class TransformingTopicApplier(TransformingApplier, TopicApplier):
    """Makes a record of each row that a transform returns."""


def applier(settings: Settings, spec: SinkSpec, by: Function | None, transform: Transformed | None) -> TopicApplier:
    """The applier of a replay. It fences the producers of earlier replays."""
    made = TopicApplier(spec)
    if transform is not None:
        made = TransformingTopicApplier(spec, columns_of(transform.schema, spec.layout), transform.apply)
    made.open(settings, by, ".replay")
    return made


class TopicWriter(PostgresWriter):
    """Writes what is new, and moves the offsets with it."""

    _applier: TopicApplier

    def __init__(
        self, settings: Settings, connection: extensions.connection, spec: SinkSpec, fetch: Fetch, by: Function | None
    ) -> None:
        """Acquire the fence, and fence the producers of earlier drivers."""
        self._settings, self._by = settings, by
        self._committed = dict[str, Mapping[int, int]]()  # by topic, where the events are decided behind
        self._doubtful = set[str]()  # topics whose events may be on the target
        super().__init__(connection, spec, fetch, None if spec.job.transform else TopicApplier(spec))

    def prepare(self, returned: Any) -> None:
        self._prepare(TransformingTopicApplier(self._spec, columns_of(returned, self._spec.layout)))

    def _prepare(self, applier: PostgresApplier) -> None:
        super()._prepare(applier)
        self._applier.open(self._settings, self._by)

    def _apply(self, batch: Batch) -> Counts:
        topic, stored = batch.topic, self.positions(batch.topic, batch.topic_id)
        if topic not in self._committed:
            # Without offsets the group is new, or Kafka has forgotten them, as after a week without any.
            found = self._applier.transactions.committed(topic, batch.topic_id, batch.end)
            self._committed[topic] = found or topics.last_stable_offsets(self._settings, topic)
        committed = self._committed[topic]
        is_behind = any(stored.get(number, 0) < offset for number, offset in committed.items())
        self._doubt(batch, is_doubtful=is_behind or any(at < stored.get(one, 0) for one, at in batch.start.items()))
        self._offsets = [
            TopicPartition(topic, number, max(end, stored.get(number, 0), committed.get(number, 0)), batch.topic_id)
            for number, end in batch.end.items()
        ]
        return super()._apply(batch)

    def _apply_rows(self, cursor: extensions.cursor, batch: Batch, encoded: Sequence[Encoded]) -> Counts:
        self._applier.outgoing = []
        counts = super()._apply_rows(cursor, batch, encoded)
        self._applier.transactions.commit(self._applier.target, self._applier.outgoing, self._offsets)
        return counts

    def _doubt(self, batch: Batch, *, is_doubtful: bool) -> None:
        """Find what the target has, from the first batch on for which that is in doubt, until it no longer is."""
        if (batch.topic in self._doubtful) is is_doubtful:
            return
        with self._errors("does not take ids"), self._connection, self._connection.cursor() as cursor:
            if is_doubtful:
                ends = topics.last_stable_offsets(self._settings, batch.topic)
                within = {number: (start, ends.get(number, start)) for number, start in batch.start.items()}
                self._applier.find_written(cursor, records.arrival(self._settings, batch.topic, within))
                self._doubtful.add(batch.topic)
            else:
                self._doubtful.remove(batch.topic)
                if not self._doubtful:
                    cursor.execute("TRUNCATE pg_temp.outbox_written")
