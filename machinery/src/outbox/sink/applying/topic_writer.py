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

import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

from confluent_kafka import TopicPartition

from outbox.base.database import connect
from outbox.base.errors import Failure
from outbox.base.heavy import extensions, extras
from outbox.base.settings import Settings, SinkRole
from outbox.base.wait import WaitTimeoutError
from outbox.events import catalog
from outbox.events.values import encode
from outbox.kafka import records, topics
from outbox.kafka.records import CLOCK_MARGIN, headers_of
from outbox.kafka.transactions import Outgoing, Transactions
from outbox.sink.applying.calling import CallingApplier, NewEvent
from outbox.sink.applying.handlers.handler import Event
from outbox.sink.applying.postgres.target import PostgresWriter
from outbox.sink.applying.postgres.transforming import TransformingApplier, columns_of
from outbox.sink.applying.projection import Projection
from outbox.sink.decoding.batch import Batch
from outbox.sink.decoding.binary import Encoded
from outbox.sink.decoding.decoder import UUID
from outbox.sink.decoding.records import Fetch
from outbox.sink.remembering import fence, positions
from outbox.sink.spec import SinkSpec, TargetState, Transformed, first_line
from outbox.sink.writer import Applied, Counts

NOT_WRITABLE = "not writable"
# Each record says which sink has written it, and which record it comes from.
ORIGIN = "origin"
PLACE = re.compile(r"([a-z0-9_-]+) ([A-Za-z0-9._-]+)/([0-9]{1,9})/([0-9]{1,18})")
DECIDED_TIMEOUT_S = 60
RECREATED = "SELECT FROM public.positions WHERE sink = %s AND is_recreated"
IDLE_MAX_S = 1.0  # while functions are called, of the transaction
RECORD_EXTRA_BYTES = 200  # of a record in a batch of one, beside key, value and headers
TABLE = "CREATE TEMPORARY TABLE outbox_written (event_id uuid NOT NULL)"
INSERT_WRITTEN = "INSERT INTO pg_temp.outbox_written (event_id) VALUES %s"
UNWRITTEN = "NOT EXISTS (SELECT FROM pg_temp.outbox_written AS known WHERE known.event_id = new.event_id)"
OLDEST = """
SELECT min(letter.recorded_at), max(letter.first_seen_at), now() FROM public.dead_letters AS letter
  JOIN pg_temp.outbox_batch AS batch ON batch.event_id::text = letter.identity
 WHERE letter.sink = %s
"""

Function = Callable[[Event], Event | None]


class Written(NamedTuple):
    """A record that a sink has written, and the place of the event on the topic that the sink reads."""

    event_id: str
    key: str
    topic: str
    partition: int
    offset: int


def origin(sink: str, topic: str, partition: int, offset: int) -> bytes:
    """The header that says where a record comes from."""
    return f"{sink} {topic}/{partition}/{offset}".encode()


def read_written(settings: Settings, sink: str, target: str, since: datetime | None = None) -> Iterator[list[Written]]:
    """The records of a sink on its target topic by now; if ``since`` is given, those that were written after that.

    Waits for transactions that are open. Raises Failure if one does not end.
    """
    try:
        ends = topics.wait_decided(settings, target, DECIDED_TIMEOUT_S)
    except WaitTimeoutError as error:
        remedy = "end the producer that has left it open; nothing is lost meanwhile"
        raise Failure(f"a transaction on topic {target} does not end", remedy, code="topic-silent") from error
    starts = dict.fromkeys(ends, 0)
    if since is not None:
        starts = ends | topics.offsets_since(settings, target, since - CLOCK_MARGIN)
    for messages in records.batches(settings, target, {number: (starts[number], end) for number, end in ends.items()}):
        some = list[Written]()
        for message in messages:
            headers = dict(headers_of(message))
            contents = headers.get(ORIGIN), headers.get("id"), message.key()
            origin_, event_id, key = (bytes(content or b"").decode(errors="replace") for content in contents)
            place = PLACE.fullmatch(origin_)
            if place is not None and place[1] == sink and UUID.fullmatch(event_id):
                some.append(Written(event_id, key, place[2], int(place[3]), int(place[4])))
        yield some


class TopicApplier(CallingApplier):
    """Makes a record of each new event: ``outgoing``, which the caller empties before a batch, and writes behind it."""

    condition = UNWRITTEN

    def __init__(self, spec: SinkSpec, _: Sequence[Projection] | None = None) -> None:
        super().__init__(spec)
        self._declared = dict[str, tuple[Collection[str], list[tuple[str, bytes]]]]()  # by type: optional, headers
        [self.target] = spec.target.topics
        self.outgoing = list[Outgoing]()
        self._found: tuple[datetime, datetime] | None = None  # by a replay: since when, and until when

    def open(self, settings: Settings, by: Function | None, suffix: str) -> None:
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
        for some in read_written(self._settings, self.name, self.target, since):
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
        """Make the records."""
        said_at = time.monotonic()

        def make(one: NewEvent) -> str | None:
            nonlocal said_at
            if time.monotonic() - said_at >= IDLE_MAX_S:
                cursor.execute("SELECT")  # Postgres ends a transaction that is idle for long
                said_at = time.monotonic()
            place = origin(self.name, parameters["topic"], one.partition, one.offset)
            try:
                record = self._record(one.event, place)
            except Exception as error:  # of the function, or of what it returns
                return first_line(error)
            self.outgoing += [] if record is None else [record]
            return None

        return self._refuse(cursor, NOT_WRITABLE, self._failures(self._new(cursor, parameters), make))

    def _record(self, event: Event, place: bytes) -> Outgoing | None:
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
        ours = [("id", event.id.encode()), *headers, (ORIGIN, place)]
        record = Outgoing(made.key.encode(), value, ours)
        if (size := record.size_bytes + RECORD_EXTRA_BYTES) > self._max_bytes:
            raise ValueError(f"a record of {size} bytes, and the topic takes {self._max_bytes}")
        return record


class TransformingTopicApplier(TransformingApplier, TopicApplier):
    """Makes a record of each row that a transform returns."""


def applier(
    settings: Settings, spec: SinkSpec, by: Function | None, transform: Transformed | None, suffix: str = ""
) -> TopicApplier:
    """The applier of a driver, or, with a suffix, of a replay. It fences the producers of earlier ones."""
    made = TopicApplier(spec)
    if transform is not None:
        made = TransformingTopicApplier(spec, columns_of(transform.schema, spec.layout), transform.apply)
    made.open(settings, by, suffix)
    return made


class TopicWriter(PostgresWriter):
    """Writes what is new, and moves the offsets with it."""

    _applier: TopicApplier

    def __init__(
        self, settings: Settings, connection: extensions.connection, spec: SinkSpec, fetch: Fetch, by: Function | None
    ) -> None:
        """Acquire the fence, and fence the producers of earlier drivers."""
        self._settings = settings
        self._committed = dict[str, Mapping[int, int]]()  # by topic, where the events are decided behind
        self._doubtful = set[str]()  # topics whose events may be on the target
        super().__init__(connection, spec, fetch, partial(applier, settings, spec, by))

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


def state(settings: Settings, sink: str, target: str) -> TargetState:
    """How many records of each key a sink has written, as far as its positions go. What is behind them is in flight."""
    with closing(connect(settings, SinkRole.AUDITOR)) as connection, connection, connection.cursor() as cursor:
        reached = positions.read_all(cursor, sink)
        cursor.execute(RECREATED, [sink])
        unread = "one of its topics was created again" if cursor.rowcount else ""
    if not topics.exists(settings, target):
        unread = f"there is no topic {target}"
    elif any(topics.first_offsets(settings, target).values()):
        unread = f"topic {target} has dropped records"
    if unread:
        return TargetState(unread=unread)
    counts = Counter[str]()
    for some in read_written(settings, sink, target):
        counts.update(one.key for one in some if one.offset < reached.get(one.topic, {}).get(one.partition, 0))

    def lacking(event_ids: Collection[str]) -> Collection[str]:
        found = read_written(settings, sink, target) if event_ids else ()
        return {*event_ids}.difference(one.event_id for some in found for one in some)

    return TargetState(reached, [(key, count, None) for key, count in counts.items()], lacking)
