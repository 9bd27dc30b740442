"""A sink whose result is a topic: the records of a batch and its offsets are one Kafka transaction. Postgres keeps the
rest.

The strategy, letters and positions are one Postgres transaction, as for every sink. Right before its commit the records
of the new events are written, with the offsets behind the batch, in a Kafka transaction. If the process ends between
the two commits, the topic has events that Postgres does not know. So beside the offsets a transaction leaves, as their
metadata, what the next driver needs to find them:

- where the positions were before, and where the target ended. If the positions are still there when the next driver
  comes, or if it reads again what lies before them, it reads what the sink has written to the target since, by id;
- the id of the topic: offsets of an earlier topic of the name count for nothing.

Events that are found there are remembered as any others, whatever else would become of them now, and are not written.
This holds however batches are cut, and for events that were set aside the first time. As long as that is in doubt, the
next transactions leave the same mark, so a second end of the process changes nothing.

A replay of dead letters is such a transaction too, by a producer of its own. Each letter says, before its event is
written, where the target ended: the next replay of it looks there.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from confluent_kafka import TopicPartition

from outbox.base.errors import Failure
from outbox.base.heavy import extensions, extras, sql
from outbox.base.settings import Settings
from outbox.events import catalog
from outbox.events.schema import EventSchema, shortened
from outbox.events.values import decode, encode
from outbox.kafka import records, topics
from outbox.kafka.records import headers_of
from outbox.kafka.transactions import Mark, Outgoing, Transactions
from outbox.sink.applying.handlers.handler import Event
from outbox.sink.applying.postgres.applier import PostgresApplier
from outbox.sink.applying.postgres.target import PostgresWriter
from outbox.sink.applying.postgres.transforming import TransformingApplier, columns_of
from outbox.sink.applying.topics import written
from outbox.sink.decoding.batch import Batch
from outbox.sink.decoding.binary import Encoded
from outbox.sink.decoding.decoder import UUID
from outbox.sink.decoding.layout import view_name
from outbox.sink.decoding.records import Fetch
from outbox.sink.remembering import dead_letters, fence
from outbox.sink.spec import SinkSpec, Transformed
from outbox.sink.writer import Applied, Counts

BY_FAILED, TOO_LARGE = "by failed", "record too large"
RECORD_EXTRA_BYTES = 200  # of a record and its batch, beside key, value and headers
END_MAX_AGE_S = 5.0
MARK_MAX_CHARACTERS = 4000  # of 4,096 that the brokers take (offset.metadata.max.bytes)
MARK = re.compile(r"(?P<topic_id>\S+) (?P<position>\d+) (?P<ends>[\d,]*)", re.ASCII)
TABLES = """
CREATE TEMPORARY TABLE outbox_written (event_id uuid NOT NULL);
CREATE TEMPORARY TABLE outbox_unwritten (LIKE outbox_batch) ON COMMIT DELETE ROWS;
"""
FOUND = "INSERT INTO pg_temp.outbox_written (event_id) VALUES %s"
TAKE_UNWRITTEN = """
WITH unwritten AS (
    DELETE FROM pg_temp.outbox_batch AS batch
     WHERE NOT EXISTS (SELECT FROM pg_temp.outbox_written AS known WHERE known.event_id = batch.event_id)
    RETURNING batch.*
)
INSERT INTO pg_temp.outbox_unwritten SELECT unwritten.* FROM unwritten
"""
LEAVE_WRITTEN = """
DELETE FROM pg_temp.outbox_batch;
DELETE FROM pg_temp.new_events;
DELETE FROM pg_temp.rejections;
INSERT INTO pg_temp.outbox_batch SELECT unwritten.* FROM pg_temp.outbox_unwritten AS unwritten;
"""
# {key} and {version} are columns of the sink's table, also where the events' views have those of a transform.
EVENTS = """
SELECT new.partition, new."offset", new.event_id::text, new.{{key}}::text, {version},
       (to_jsonb(one.*) - ARRAY['event_id', 'partition', 'offset'])::text
  FROM pg_temp.new_events AS new
  JOIN {view} AS one ON one.partition = new.partition AND one."offset" = new."offset"
"""
REJECT = "INSERT INTO pg_temp.rejections (event_id, reason, detail) VALUES %s"
BEGIN_REPLAY = """
WITH replayed AS (
    SELECT letter.identity, letter.resolution FROM public.dead_letters AS letter
      JOIN pg_temp.outbox_batch AS batch ON batch.event_id::text = letter.identity
     WHERE letter.sink = %(sink)s AND letter.status = 'open'
), begun AS (
    UPDATE public.dead_letters AS letter SET resolution = %(begun)s
      FROM replayed
     WHERE letter.sink = %(sink)s AND letter.identity = replayed.identity AND replayed.resolution IS NULL
)
SELECT DISTINCT replayed.resolution FROM replayed WHERE replayed.resolution LIKE 'replay begun%%'
"""
BEGUN = "replay begun, topic ended at "
APPLIED = "SELECT applied FROM public.sinks WHERE name = %s"


Function = Callable[[Event], Event | None]


class Found(NamedTuple):
    """A new event, and its place."""

    partition: int
    offset: int
    event: Event
    text: str  # its payload


@dataclass
class Past:
    """How far a sink may have written events of a topic already, as a driver finds it."""

    marks: Mapping[int, int]  # by partition, where its events are decided behind
    ends: Sequence[int] = ()  # of the target, by partition: what may be unknown is behind them
    is_read: bool = False


class TopicApplier(PostgresApplier):
    """Makes a record of each new event. ``outgoing`` are those of the last batch, which are to be written."""

    transactions: Transactions
    has_written = False  # whether events of the batch may be on the target

    def __init__(self, spec: SinkSpec, _: object = None) -> None:
        super().__init__(spec, ())
        self._is_ordered = any(decoder.version is not None for decoder in spec.decoders.values())
        [self._target] = spec.target.topics
        self._views = {event: sql.Identifier("pg_temp", view_name(event)) for event in spec.layout.types}
        self._schemas = dict[str, EventSchema]()
        self.outgoing: list[Outgoing] = []

    def open(self, settings: Settings, by: Function | None, suffix: str = "") -> None:
        """Begin to produce. Raises Failure if Kafka, or the target topic, is unavailable."""
        self._settings, self._catalog, self._by = settings, catalog.of_project(settings), by
        found = topics.existing(settings, [self._target]).get(self._target)
        if found is None:
            what = f"sink {self.name} writes to topic {self._target}, which does not exist"
            raise Failure(what, "create it, as docs/topics.md says", code="topic-missing")
        self.partitions = found.partitions
        config = topics.config(settings, self._target)
        self._max_bytes = int(config["max.message.bytes"])
        self.is_compacted = "compact" in config["cleanup.policy"]
        name = f"{settings.topic_prefix}.{self.name}{suffix}"
        self.transactions = Transactions(settings, name, max(1000, self._max_bytes))

    def prepare(self, cursor: extensions.cursor) -> None:
        super().prepare(cursor)
        cursor.execute(TABLES)

    def renew(self, cursor: extensions.cursor) -> None:
        super().renew(cursor)
        cursor.execute("TRUNCATE pg_temp.outbox_unwritten")

    def find(self, cursor: extensions.cursor, ends: Sequence[int]) -> None:
        """Note the events that the sink has written to the target behind these ends. Waits for open transactions."""
        for some in written.read(self._settings, self.name, self._target, dict(enumerate(ends))):
            self.note(cursor, [one.event_id for one in some])

    def note(self, cursor: extensions.cursor, event_ids: Sequence[str]) -> None:
        """Note that the target has these events, and commit that: no transaction waits for what is read next."""
        if event_ids:
            extras.execute_values(cursor, FOUND, [(one,) for one in event_ids], page_size=10_000)
            cursor.connection.commit()

    def replay(self, cursor: extensions.cursor, batch: Batch, fetch: Fetch, *, older_than_horizon: bool) -> Applied:
        """Write the events of letters. Letters that an earlier replay has begun with may be on the target already."""
        self.take(cursor, self.rows(batch))
        begun = BEGUN + joined(self.transactions.ends(self._target, self.partitions))
        cursor.execute(BEGIN_REPLAY, {"sink": self.name, "begun": begun})
        before = [_split(text.removeprefix(BEGUN)) for (text,) in cursor]
        with fence.between_transactions(cursor, self.name):
            if before:
                self.find(cursor, [min(ends) for ends in zip(*before, strict=False)])
        self.has_written = bool(before)
        applied = super().replay(cursor, batch, fetch, older_than_horizon=older_than_horizon)
        self.transactions.commit(self._target, self.outgoing)
        return applied

    def _apply(
        self, cursor: extensions.cursor, parameters: Mapping[str, Any], admitted: str | None, fetch: Fetch
    ) -> Applied:
        self.outgoing = []
        if self.has_written:
            cursor.execute(TAKE_UNWRITTEN)
            count = _count(cursor)
            if count:
                self._execute(cursor, self.strategy.select, parameters)
                cursor.execute("DELETE FROM pg_temp.rejections")
                if self.strategy.remember:
                    self._execute(cursor, self.strategy.remember, parameters)
                dead_letters.mark_replayed(cursor, self.name, count)
            cursor.execute(LEAVE_WRITTEN)
        return super()._apply(cursor, parameters, admitted, fetch)

    def _project(self, cursor: extensions.cursor, parameters: Mapping[str, Any]) -> bool:
        """Make the records. Events of which none can be made are set aside, and so are later ones of their keys."""
        problems = list[tuple[str, str, str]]()
        failed_at = dict[str, int]()  # by key the first version that has failed
        for found in self._new(cursor, parameters):
            event = found.event
            if event.version is not None and event.version > failed_at.get(event.key, event.version):
                continue  # it is parked
            record, problem = self._record(found, parameters["topic"])
            if problem is not None:
                problems.append((event.id, *problem))
                failed_at.setdefault(event.key, event.version or 0)
            elif record is not None:
                self.outgoing.append(record)
        extras.execute_values(cursor, REJECT, problems)
        return bool(problems)

    def _new(self, cursor: extensions.cursor, parameters: Mapping[str, Any]) -> list[Found]:
        """The new events, in the order of their topic."""
        found = list[Found]()
        version = sql.SQL("new.{version}" if "version" in self._names[parameters["topic"]] else "NULL::bigint")
        for name in self._decoders[parameters["topic"]].types:
            statement = sql.SQL(EVENTS).format(view=self._views[name], version=version).as_string(cursor)
            self._execute(cursor, statement, parameters)
            for partition, offset, event_id, key, number, text in cursor:
                found.append(Found(partition, offset, Event(event_id, name, key, number, {}), text))
        return sorted(found, key=lambda one: one[:2])

    def _record(self, found: Found, topic: str) -> tuple[Outgoing | None, tuple[str, str] | None]:
        """The record of an event, None if its function leaves it out; or why there is none."""
        event, payload = found.event, decode(found.text.encode())
        try:
            if self._by is not None:
                made = self._by(event._replace(payload=payload))
                if made is None:
                    return None, None
                event, payload = made, made.payload
            schema = self._schema(event.type)
            optional = schema.properties.keys() - schema.required
            value = encode({name: one for name, one in payload.items() if one is not None or name not in optional})
            key = event.key.encode()
        except Exception as error:  # of the function, or of what it returns
            said = type(error).__name__
            return None, (BY_FAILED, said if self._is_personal else shortened(f"{said}: {error}".partition("\n")[0]))
        headers = [
            ("id", found.event.id.encode()),
            ("eventType", schema.type.encode()),
            ("schemaVersion", str(schema.version).encode()),
            (written.ORIGIN, written.origin(self.name, topic, found.partition, found.offset)),
        ]
        size = len(key) + len(value) + sum(len(name) + len(content) for name, content in headers) + RECORD_EXTRA_BYTES
        if size > self._max_bytes:
            return None, (TOO_LARGE, f"it has {size} bytes, and topic {self._target} takes {self._max_bytes}")
        return Outgoing(key, value, headers), None

    def _schema(self, event: str) -> EventSchema:
        if event not in self._schemas:
            self._schemas[event] = self._catalog.wanted([event])[0].schema
        return self._schemas[event]


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
        self,
        settings: Settings,
        connection: extensions.connection,
        spec: SinkSpec,
        fetch: Fetch,
        by: Function | None,
    ) -> None:
        """Acquire the fence, and fence the producers of earlier drivers."""
        self._settings, self._by = settings, by
        [self._target] = spec.target.topics
        self._pasts: dict[str, Past] = {}
        self._ends: Sequence[int] = ()
        self._ends_at_s = 0.0
        super().__init__(connection, spec, fetch, TopicApplier(spec))

    def prepare(self, returned: Any) -> None:
        self._prepare(TransformingTopicApplier(self._spec, columns_of(returned, self._spec.layout)))

    def _prepare(self, applier: PostgresApplier) -> None:
        super()._prepare(applier)
        self._applier.open(self._settings, self._by)

    def _apply(self, batch: Batch) -> Counts:
        stored = self.positions(batch.topic, batch.topic_id)
        past = self._pasts.get(batch.topic)
        if past is None:
            past = self._pasts[batch.topic] = self._past(batch, stored)
        is_behind = any(stored.get(number, 0) < offset for number, offset in past.marks.items())
        is_reread = any(offset < stored.get(number, 0) for number, offset in batch.start.items())
        self._applier.has_written = is_behind or is_reread
        if self._applier.has_written and not past.is_read:
            self._find(batch, stored, past)
            past.is_read = True
        ends = past.ends if self._applier.has_written else self._fresh_ends()
        self._offsets = [
            TopicPartition(
                batch.topic,
                number,
                max(offset, stored.get(number, 0), past.marks.get(number, 0)),
                f"{batch.topic_id} {stored.get(number, 0)} {joined(ends)}",
            )
            for number, offset in batch.end.items()
        ]
        return super()._apply(batch)

    def _apply_rows(self, cursor: extensions.cursor, batch: Batch, encoded: Sequence[Encoded]) -> Counts:
        self._applier.outgoing = []
        counts = super()._apply_rows(cursor, batch, encoded)
        self._applier.transactions.commit(self._target, self._applier.outgoing, self._offsets)
        return counts

    def _past(self, batch: Batch, stored: Mapping[int, int]) -> Past:
        """How far the drivers before have come, as Kafka says."""
        source = topics.describe(self._settings, batch.topic)
        committed = self._applier.transactions.committed(batch.topic, source.partitions)
        found = {number: read for number, mark in committed.items() if (read := read_mark(mark, batch.topic_id))}
        marks = {number: committed[number].offset for number in found}
        if not found:  # the group is new; or Kafka has forgotten its offsets, as after a week without any
            is_new = not self._has_applied()
            return Past({} if is_new else topics.last_stable_offsets(self._settings, batch.topic))
        # If the positions were moved back, the last transaction is not all that they do not know.
        is_older = any(stored.get(number, 0) < position for number, (position, _) in found.items())
        return Past(marks, () if is_older else max((ends for _, ends in found.values()), key=sum))

    def _has_applied(self) -> bool:
        with self._errors("does not say what it has applied"), self._connection, self._connection.cursor() as cursor:
            cursor.execute(APPLIED, [self.name])
            [(applied,)] = cursor
            return bool(applied)

    def _find(self, batch: Batch, stored: Mapping[int, int], past: Past) -> None:
        """Note what the target has. If it may have lost records, every event that the last transaction has passed."""
        with self._errors("does not take ids"), self._connection, self._connection.cursor() as cursor:
            self._applier.find(cursor, past.ends)
            first = topics.first_offsets(self._settings, self._target)
            has_lost = any(first.get(number, 0) > end for number, end in enumerate(past.ends))
            if past.ends and (has_lost or self._applier.is_compacted):
                within = {number: (stored.get(number, 0), end) for number, end in past.marks.items()}
                for some in records.batches(self._settings, batch.topic, within):
                    self._applier.note(cursor, [*_ids(some)])

    def _fresh_ends(self) -> Sequence[int]:
        """Where the target ends, or has ended a moment ago."""
        if time.monotonic() - self._ends_at_s > END_MAX_AGE_S or not self._ends:
            self._ends = self._applier.transactions.ends(self._target, self._applier.partitions)
            self._ends_at_s = time.monotonic()
        return self._ends


def joined(ends: Sequence[int]) -> str:
    """Offsets as a text that fits beside an offset. What is cut off makes an offset lower, or 0."""
    return ",".join(map(str, ends))[:MARK_MAX_CHARACTERS]


def _split(text: str) -> list[int]:
    return [int(one or 0) for one in text.split(",")]


def read_mark(mark: Mark, topic_id: str) -> tuple[int, Sequence[int]] | None:
    """The position and the ends in a mark; None if it is not of this topic, or not ours."""
    found = MARK.fullmatch(mark.text)
    return (int(found["position"]), _split(found["ends"])) if found and found["topic_id"] == topic_id else None


def _ids(messages: Iterable[Any]) -> Iterator[str]:
    for message in messages:
        event_id = (dict(headers_of(message)).get("id") or b"").decode(errors="replace")
        if UUID.fullmatch(event_id):
            yield event_id


def _count(cursor: extensions.cursor) -> int:
    cursor.execute("SELECT count(*) FROM pg_temp.outbox_batch")
    ((count,),) = cursor.fetchall()
    return int(count)
