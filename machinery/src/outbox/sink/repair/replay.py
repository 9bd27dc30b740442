"""What an operator does about dead letters: replay them, or discard them. Both work beside the running sink.

Letters are handled in chunks. Each chunk is one transaction, which takes the sink's lock first, as the driver does. It
applies the events and updates the status of their letters. So no event is applied twice, whenever the process is killed
and however often the command is repeated. A target outside the database applies the events between two transactions,
under the same lock, and recognises the events that it already has. A replay does not change positions or epoch, because
they belong to the driver.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any, NamedTuple

import pyarrow as pa
from psycopg2 import extensions

from outbox.base.database import database_errors
from outbox.base.errors import Failure
from outbox.events.schema import Rejection
from outbox.sink import dead_letters, fence, partitions, skipped
from outbox.sink.applier import PARKED, Applier
from outbox.sink.decoder import DecodedEvent, RecordDecoder, Skipped
from outbox.sink.layout import Layout
from outbox.sink.repair.restore import Letter, event_of, is_current
from outbox.sink.repair.selection import Chosen
from outbox.sink.spec import SinkSpec
from outbox.sink.writer import Counts, count

CHUNK = 1000
CHUNK_BYTES = 16 << 20  # the events of a chunk are in memory
# A sink that runs parks more while letters are replayed. So this is more than it parks in one batch of some seconds.
FOLLOWING_MAX = 50_000
FETCHED = 50  # letters in memory with their bytes
AGAIN = "run the command again: what is done is done, and is not repeated"

OPEN = """
SELECT identity, key, headers, value, event::text, event_type, schema_version, event_id, partition, "offset",
       round(extract(epoch FROM coalesce(recorded_at, first_seen_at)) * 1000)::bigint
  FROM dead_letters
 WHERE sink = %(sink)s AND identity = ANY(%(identities)s) AND status = 'open'
   AND (reason = %(reason)s OR %(reason)s IS NULL)
 ORDER BY partition, "offset"
"""
# Locks each letter when it is fetched. A letter that was closed meanwhile is left out.
CLAIM = f"{OPEN} FOR UPDATE"
KEYS = "SELECT DISTINCT key FROM dead_letters WHERE sink = %(sink)s AND identity = ANY(%(identities)s)"
FOLLOWING = """
SELECT sink, topic, topic_id, identity
  FROM dead_letters
 WHERE sink = %(sink)s AND topic = %(topic)s AND status = 'open' AND reason = %(parked)s
   AND CASE WHEN status = 'open' THEN sha256(key) END
       = ANY(ARRAY(SELECT sha256(key) FROM unnest(%(keys)s::bytea[]) AS key))
   AND identity <> ALL(%(done)s)
 ORDER BY topic_id, partition, "offset"
 LIMIT %(limit)s
"""
# Closed without being applied. Should the sink ask for the event later, it is applied if it comes again.
SKIP = """
UPDATE dead_letters SET status = 'skipped', last_seen_at = now()
 WHERE sink = %(sink)s AND identity = ANY(%(identities)s) AND status = 'open'
"""
DISCARD = """
UPDATE dead_letters SET status = 'discarded', resolution = %(resolution)s, last_seen_at = now()
 WHERE sink = %(sink)s AND identity = ANY(%(identities)s) AND status = 'open'
"""


class Replayed(NamedTuple):
    """What became of letters: applied, found to be applied already, rejected again and left open, closed because the
    sink does not ask for the event, or closed because its transform leaves the event out.
    """

    applied: int = 0
    duplicates: int = 0
    rejected: int = 0
    skipped: int = 0
    filtered: int = 0

    def plus(self, other: Replayed) -> Replayed:
        """Both together."""
        return Replayed(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def replay(
    connection: extensions.connection,
    known: Mapping[str, SinkSpec],
    chosen: Sequence[Chosen],
    *,
    applier_of: Callable[[SinkSpec], Applier],
    older_than_horizon: bool = False,
    dry_run: bool = False,
) -> dict[str, Replayed]:
    """Validate letters by today's contract and apply the valid ones, by the strategy and projections of their sink,
    which is among ``known``. Returns by sink what became of them. With ``dry_run`` all of it is rolled back.

    What the sink has parked behind them since they were chosen is replayed too. Otherwise it would keep parking events
    of these keys, and no replay beside it would ever come to an end.

    With ``older_than_horizon`` it is the letters older than the deduplication horizon, and no others, and they are
    applied as new: no strategy can know, so the caller has made sure that they never were. Without it they are rejected
    again.

    A letter that is no longer open is left out: each event is applied once. Raises Failure if a sink is unknown or does
    not read the letters' topic any more, or if the database refuses a chunk, of which then nothing is done; the chunks
    before it stay.
    """
    _require({letter.sink for letter in chosen}, known)
    done: dict[str, Replayed] = {}
    for sink, letters in itertools.groupby(chosen, key=lambda letter: letter.sink):
        spec = known[sink]
        applier = applier_of(spec)
        done[sink] = Replayed()
        with database_errors(connection, f"sink {sink}", "refused the replay", AGAIN):
            with connection, connection.cursor() as cursor:
                cursor.execute(fence.SESSION)
                applier.prepare(cursor)
            dealt_with: dict[str, _DealtWith] = defaultdict(_DealtWith)
            for chunk in _chunks(letters):
                decoder = _decoder(spec, chunk[0].topic)
                if applier.strategy.remembers_ids:  # before the transaction: a partition costs locks
                    partitions.ensure(connection, _days(connection, decoder, chunk))
                with connection:
                    one = _Replay(connection, applier, decoder, spec.layout)
                    done[sink] = done[sink].plus(one.run(chunk, older_than_horizon))
                    dealt_with[chunk[0].topic].add(connection, chunk)
                    if dry_run:
                        connection.rollback()
            for topic, of_topic in dealt_with.items() if not (dry_run or older_than_horizon) else ():
                one = _Replay(connection, applier, spec.decoders[topic], spec.layout)
                done[sink] = done[sink].plus(one.follow(topic, of_topic))
            with connection, connection.cursor() as cursor:
                applier.end(cursor)
    return done


def discard(
    connection: extensions.connection, chosen: Sequence[Chosen], *, because: str, dry_run: bool = False
) -> dict[str, int]:
    """Give letters up: their events are never applied, even if they are repeated. Returns how many, by sink.

    Each letter keeps the reason, ``because``. `outbox check` then counts it as acknowledged, not as a failure.

    Raises Failure if the database refuses it.
    """
    done: dict[str, int] = {}
    for sink, letters in itertools.groupby(chosen, key=lambda letter: letter.sink):
        done[sink] = 0
        with database_errors(connection, f"sink {sink}", "refused to discard dead letters", AGAIN):
            for chunk in _chunks(letters):
                with connection, connection.cursor() as cursor:
                    cursor.execute(fence.SESSION)
                    fence.lock(cursor, sink)
                    cursor.execute(DISCARD, {**_names(chunk), "resolution": because})
                    done[sink] += cursor.rowcount
                    if dry_run:
                        connection.rollback()
    return done


def _decoder(spec: SinkSpec, topic: str) -> RecordDecoder:
    """Raises Failure if the sink does not read the topic any more."""
    if topic not in spec.decoders:
        raise Failure(
            f"sink {spec.name} does not read topic {topic} any more, so dead letters from there cannot be replayed",
            "discard them, or let the sink read the topic again",
            code="topic-not-read",
        )
    return spec.decoders[topic]


@dataclass
class _DealtWith:
    """The letters of a topic that were dealt with, each once, and their keys."""

    keys: set[bytes] = field(default_factory=set)
    identities: set[str] = field(default_factory=set)

    def add(self, connection: extensions.connection, chunk: Sequence[Chosen]) -> None:
        self.identities.update(letter.identity for letter in chunk)
        with connection.cursor() as cursor:
            cursor.execute(KEYS, _names(chunk))
            self.keys.update(bytes(key) for (key,) in cursor if key is not None)


class _Replay:
    """The replay of one chunk, in the caller's transaction."""

    def __init__(
        self, connection: extensions.connection, applier: Applier, decoder: RecordDecoder, layout: Layout
    ) -> None:
        self._connection, self._applier, self._decoder, self._layout = connection, applier, decoder, layout

    def run(self, chunk: Sequence[Chosen], older_than_horizon: bool) -> Replayed:
        sink = self._applier.name
        with self._connection.cursor() as cursor:
            fence.lock(cursor, sink)
            current: list[str] = []  # identities of letters that have an event in today's columns
            events: list[tuple[DecodedEvent, int, int]] = []
            unwanted: dict[str, Skipped] = {}
            rejections: dict[str, Rejection] = {}
            reason = dead_letters.OLDER_THAN_HORIZON if older_than_horizon else None
            for letter in _open(self._connection, chunk, CLAIM, reason):
                if is_current(letter, self._decoder, self._layout):
                    current.append(letter.identity)
                    continue
                found = event_of(letter, self._decoder)
                if isinstance(found, DecodedEvent):
                    events.append((found, letter.partition, letter.offset))
                elif isinstance(found, Skipped):
                    unwanted[letter.identity] = found
                else:
                    rejections[letter.identity] = found
            self._applier.copy(cursor, self._decoder.rows(events))
            if current:
                self._applier.stage_letters(cursor, current)
            dead_letters.update_reasons(cursor, sink, rejections)
            self._skip(cursor, chunk[0].topic, unwanted)
            applied, rejected, filtered = self._applier.replay(
                cursor, chunk[0].topic, chunk[0].topic_id, older_than_horizon=older_than_horizon
            )
            duplicates = len(current) + len(events) - applied - rejected - filtered
            counts = Counts(applied=applied, duplicates=duplicates, skipped=len(unwanted), filtered=filtered)
            count(cursor, sink, counts)
            return Replayed(applied, duplicates, rejected + len(rejections), len(unwanted), filtered)

    def follow(self, topic: str, dealt_with: _DealtWith) -> Replayed:
        """Replay what was parked behind letters since they were chosen, in transactions of its own.

        In the last one, with the sink's lock, there is nothing left that the sink could park the next event behind.
        """
        done = Replayed()
        while True:
            with self._connection, self._connection.cursor() as cursor:
                fence.lock(cursor, self._applier.name)
                parameters = {
                    "sink": self._applier.name,
                    "topic": topic,
                    "parked": PARKED,
                    "keys": list(dealt_with.keys),
                    "done": list(dealt_with.identities),
                    "limit": FOLLOWING_MAX,
                }
                cursor.execute(FOLLOWING, parameters)
                following = [Chosen(*row) for row in cursor]
                chunk = [letter for letter in following if letter.topic_id == following[0].topic_id]
                if not chunk:
                    return done
                done = done.plus(self.run(chunk, older_than_horizon=False))
            dealt_with.identities.update(letter.identity for letter in chunk)

    def _skip(self, cursor: extensions.cursor, topic: str, unwanted: Mapping[str, Skipped]) -> None:
        sink = self._applier.name
        cursor.execute(SKIP, {"sink": sink, "identities": list(unwanted)})
        recorded, names = skipped.load(cursor, sink).get(topic, set()), {one.name for one in unwanted.values()}
        skipped.record(cursor, sink, topic, skipped.new(recorded, names, self._decoder.declared_names))


def _days(connection: extensions.connection, decoder: RecordDecoder, chunk: Sequence[Chosen]) -> set[date]:
    """The days of the events that are valid now and were not before: the strategy will remember their ids."""
    with connection:
        found = [event_of(letter, decoder) for letter in _open(connection, chunk, OPEN) if letter.event is None]
    return partitions.days(pa.array([one.event_id for one in found if isinstance(one, DecodedEvent)], pa.string()))


def _open(
    connection: extensions.connection, chunk: Sequence[Chosen], query: str, reason: str | None = None
) -> Iterator[Letter]:
    with connection.cursor("open_letters") as cursor:  # a cursor on the server, because a letter may be large
        cursor.itersize = FETCHED
        cursor.execute(query, {**_names(chunk), "reason": reason})
        yield from map(Letter._make, cursor)


def _chunks(letters: Iterator[Chosen]) -> Iterator[list[Chosen]]:
    """Chunks of letters of one topic, bounded in number and bytes; a letter that is larger is a chunk of its own."""
    for _, of_topic in itertools.groupby(letters, key=lambda letter: (letter.topic, letter.topic_id)):
        chunk: list[Chosen] = []
        size_bytes = 0
        for letter in of_topic:
            size_bytes += letter.size_bytes
            if chunk and (len(chunk) == CHUNK or size_bytes > CHUNK_BYTES):
                yield chunk
                chunk, size_bytes = [], letter.size_bytes
            chunk.append(letter)
        yield chunk


def _names(chunk: Sequence[Chosen]) -> dict[str, Any]:
    return {"sink": chunk[0].sink, "identities": [letter.identity for letter in chunk]}


def _require(sinks: set[str], known: Collection[str]) -> None:
    unknown = sorted(sinks.difference(known))
    if unknown:
        raise Failure(
            f"there is no sink called {', '.join(unknown)} any more, so its dead letters cannot be replayed",
            f"choose by --sink among {', '.join(known)}",
            code="sink-unknown",
        )
