"""The repairs of dead letters: an operator chooses letters, and replays or discards them beside the running sink.

Letters are handled in chunks. Each chunk is one transaction, which takes the sink's lock first, as the driver does. It
applies the events and updates the status of their letters. So no event is applied twice, whenever the process is killed
and however often the command is repeated. A target outside the database applies the events between two transactions,
under the same lock, and recognises the events that it already has. A replay does not change positions or epoch, because
they belong to the driver.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from psycopg2 import extensions
from psycopg2.extras import RealDictCursor

from outbox.base.database import database_errors
from outbox.events.schema import Rejection
from outbox.sink.decoding import dead_records
from outbox.sink.decoding.batch import Batch
from outbox.sink.decoding.decoder import DecodedEvent, RecordDecoder, Skipped
from outbox.sink.decoding.records import Decoded, Place, Record
from outbox.sink.decoding.values import days
from outbox.sink.remembering import dead_letters, fence, strategy
from outbox.sink.remembering.dead_letters import FILTERED
from outbox.sink.spec import SinkSpec
from outbox.sink.writer import PARKED, Applier, Counts, count

Status = Literal["open", "replayed", "discarded", "all"]

CONDITIONS = {
    "sink": "sink = %(sink)s",
    "reason": "reason = %(reason)s",
    "identities": "identity = ANY(%(identities)s)",
    "key": "key = convert_to(%(key)s, 'UTF8')",
    "status": "status = %(status)s",
}
OR_REPLAYED = f"""
(status = 'open' OR status = 'replayed' AND resolution IS DISTINCT FROM '{FILTERED}' AND event_id IS NOT NULL
                    AND sink = ANY(%(elsewhere)s))
"""
COLUMNS = """
sink, identity, topic, topic_id, partition, "offset", event_id, is_event, reason, detail, status, resolution,
recorded_at, first_seen_at, last_seen_at, key
"""
SIZE_BYTES = "coalesce(octet_length(key), 0) + pg_column_size(headers) + coalesce(octet_length(value), 0)"

CHUNK = 1000
CHUNK_BYTES = 16 << 20  # the records of a chunk are in memory
FETCHED = 50  # letters that the server sends at once: one may be large
AGAIN = "run the command again: what is done is done, and is not repeated"

# Each letter is locked when it is fetched. One that another command has closed since it was chosen is left out. The
# letters in `lost` are closed on purpose: the sink's result has lost their events.
CLAIM = """
SELECT identity, key, headers, value, is_event, partition, "offset",
       round(extract(epoch FROM recorded_at) * 1000)::bigint
  FROM public.dead_letters
 WHERE sink = %(sink)s AND identity = ANY(%(identities)s)
   AND (status = 'open' OR status = 'replayed' AND identity = ANY(%(lost)s))
   AND (reason = %(reason)s OR %(reason)s IS NULL)
 ORDER BY partition, "offset"
   FOR UPDATE
"""
# The letters that are parked behind those that were dealt with.
FOLLOWING = f"""
SELECT sink, topic, topic_id, identity, {SIZE_BYTES}
  FROM public.dead_letters
 WHERE sink = %(sink)s AND topic = %(topic)s AND status = 'open' AND reason = %(parked)s
   AND CASE WHEN status = 'open' THEN sha256(key) END
       = ANY(ARRAY(SELECT DISTINCT sha256(before.key) FROM public.dead_letters AS before
                    WHERE before.sink = %(sink)s AND before.identity = ANY(%(done)s)))
   AND identity <> ALL(%(done)s)
 ORDER BY topic_id, partition, "offset"
 LIMIT %(at_once)s
"""  # noqa: S608


class Chosen(NamedTuple):
    """A chosen letter, and the topic that it came from."""

    sink: str
    topic: str
    topic_id: str
    identity: str
    size_bytes: int = 0  # about how many its record has
    is_open: bool = True


@dataclass(frozen=True)
class Selection:
    """Letters that pass every filter that is set."""

    sink: str | None = None
    reason: str | None = None
    identities: Sequence[str] = ()
    key: str | None = None
    status: Status = "open"
    # Sinks with their results outside the sink database. A restored result may have lost replayed events, so the
    # replayed letters of these sinks pass the filter for open ones.
    elsewhere: Sequence[str] = ()

    def choose(self, connection: extensions.connection, *, with_parked: bool = False) -> list[Chosen]:
        """The letters, sink by sink, topic by topic, and in the order of the topic. ``with_parked`` adds the
        parked letters of the same keys, because a chosen letter may have to wait for one of them.
        """
        condition = self._condition
        if with_parked:
            condition += (
                f" OR status = 'open' AND reason = '{PARKED}' AND (sink, topic, key) IN"  # noqa: S608
                f" (SELECT sink, topic, key FROM public.dead_letters WHERE {condition})"
            )
        with connection, connection.cursor() as cursor:
            cursor.execute(
                f"SELECT sink, topic, topic_id, identity, {SIZE_BYTES}, status = 'open' "  # noqa: S608
                f"FROM public.dead_letters WHERE {condition} "
                "ORDER BY sink, topic, min(first_seen_at) OVER (PARTITION BY sink, topic, topic_id), topic_id, "
                'partition, "offset"',
                self._parameters,
            )
            return [Chosen(*row) for row in cursor]

    def read(
        self, connection: extensions.connection, *, limit: int | None = None, in_full: bool = False
    ) -> list[dict[str, Any]]:
        """The letters, the oldest first; with their headers and values if ``in_full``."""
        columns = f"{COLUMNS}, headers, value" if in_full else COLUMNS
        with connection.cursor(cursor_factory=RealDictCursor) as cursor:
            cursor.execute(
                f"SELECT {columns} FROM public.dead_letters WHERE {self._condition} "  # noqa: S608
                "ORDER BY first_seen_at, sink, identity LIMIT %(limit)s",
                {**self._parameters, "limit": limit},
            )
            return [dict(row) for row in cursor]

    @property
    def _condition(self) -> str:
        conditions = CONDITIONS | ({"status": OR_REPLAYED} if self.elsewhere else {})
        given = [sql for name, sql in conditions.items() if getattr(self, name) and getattr(self, name) != "all"]
        return " AND ".join(given) or "true"

    @property
    def _parameters(self) -> dict[str, Any]:
        return {**vars(self), "identities": list(self.identities), "elsewhere": list(self.elsewhere)}


class Replayed(NamedTuple):
    """Counts of letters: applied, applied already, rejected again and left open, or closed because the sink's transform
    leaves the event out.
    """

    applied: int = 0
    duplicates: int = 0
    rejected: int = 0
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
    at_once: int | None = None,
) -> dict[str, Replayed]:
    """Decode the records of letters by today's contract and apply the events, by the strategy and projections of their
    sink, which is among ``known``. Returns by sink what became of them.

    The events that are parked behind them are replayed too, also those that the sink parks meanwhile. Otherwise it
    would keep parking events of these keys, and no replay beside it would ever come to an end.

    With ``older_than_horizon`` it is the letters older than the deduplication horizon, and no others, and they are
    applied as new: no strategy can know, so the caller has made sure that they never were. Without it they are rejected
    again.

    ``at_once`` is how many letters a transaction takes at most; CHUNK by default.

    A letter that is no longer open is left out: each event is applied once. A letter that was chosen as replayed is
    replayed again if the sink's result has lost its event: a table may be restored. A letter whose event the sink does
    not ask for any more stays open. Raises Failure if the database refuses a chunk, of which then nothing is done; the
    chunks before it stay.
    """
    done: dict[str, Replayed] = {}
    at_once = at_once or CHUNK
    for sink, letters in itertools.groupby(chosen, key=lambda letter: letter.sink):
        spec = known[sink]
        applier = applier_of(spec)
        done[sink] = Replayed()
        with database_errors(connection, f"sink {sink}", "refused the replay", AGAIN):
            with connection, connection.cursor() as cursor:
                cursor.execute(fence.SESSION)
                applier.prepare(cursor)
            dealt_with: dict[str, set[str]] = defaultdict(set)
            for chunk in _chunks(_due(applier, letters), at_once):
                decoder = spec.decoders.get(chunk[0].topic)
                if decoder is not None and applier.strategy.remembers_ids:  # before: a partition costs locks
                    with connection:  # the days of events that are valid now: the strategy will remember their ids
                        found = [_event(letter, decoder) for letter in _open(connection, chunk) if not letter.is_event]
                    valid = days(one.event_id for one in found if isinstance(one, DecodedEvent))
                    strategy.ensure_partitions(connection, valid)
                with connection:
                    replayed = _replay(connection, applier, spec, chunk, is_older=older_than_horizon)
                    done[sink] = done[sink].plus(replayed)
                    dealt_with[chunk[0].topic].update(letter.identity for letter in chunk)
            for topic, identities in {} if older_than_horizon else dealt_with.items():
                done[sink] = done[sink].plus(_follow(connection, applier, spec, topic, identities, at_once=at_once))
            with connection, connection.cursor() as cursor:
                cursor.execute("DISCARD TEMP")  # the next sink makes tables of its own
    return done


def discard(connection: extensions.connection, chosen: Sequence[Chosen], *, because: str) -> dict[str, int]:
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
                    identities = [letter.identity for letter in chunk]
                    done[sink] += dead_letters.discard(cursor, sink, identities, because)
    return done


def _replay(
    connection: extensions.connection, applier: Applier, spec: SinkSpec, chosen: Sequence[Chosen], *, is_older: bool
) -> Replayed:
    """Replay letters of one topic, which the sink maybe does not read any more, in the caller's transaction."""
    topic = chosen[0].topic
    decoder = spec.decoders.get(topic)
    with connection.cursor() as cursor:
        fence.lock(cursor, spec.name)
        events: list[tuple[DecodedEvent, int, int]] = []
        records: dict[Place, Record] = {}
        rejections: dict[str, Rejection] = {}
        for letter in _open(connection, chosen, dead_letters.OLDER_THAN_HORIZON if is_older else None):
            found = _event(letter, decoder)
            if isinstance(found, DecodedEvent):
                events.append((found, letter.partition, letter.offset))
                records[letter.partition, letter.offset] = letter.record
            else:
                rejections[letter.identity] = found
        dead_letters.update_reasons(cursor, spec.name, rejections)
        if decoder is None or not events:
            return Replayed(rejected=len(rejections))
        chunk = spec.chunking(topic).of_decoded(Decoded(decoder.rows(events), []))
        applied, rejected, filtered = applier.replay(
            cursor,
            Batch(topic, chosen[0].topic_id, {}, {}, chunk),
            lambda _, places: [(place, records[place]) for place in places],
            older_than_horizon=is_older,
        )
        duplicates = len(events) - applied - rejected - filtered
        count(cursor, spec.name, Counts(applied=applied, duplicates=duplicates, filtered=filtered))
        return Replayed(applied, duplicates, rejected + len(rejections), filtered)


def _follow(
    connection: extensions.connection,
    applier: Applier,
    spec: SinkSpec,
    topic: str,
    dealt_with: set[str],
    *,
    at_once: int,
) -> Replayed:
    """Replay the letters that are parked behind these letters of a topic, each once, in further transactions.

    In the last transaction, with the sink's lock, there is nothing left that the sink could park the next event behind.
    """
    names = {"sink": spec.name, "topic": topic, "parked": PARKED, "at_once": at_once}
    done = Replayed()
    while True:
        with connection, connection.cursor() as cursor:
            fence.lock(cursor, spec.name)
            cursor.execute(FOLLOWING, {**names, "done": list(dealt_with)})
            chunk = next(_chunks([Chosen(*row) for row in cursor], at_once), [])
            if not chunk:
                return done
            done = done.plus(_replay(connection, applier, spec, chunk, is_older=False))
        dealt_with.update(letter.identity for letter in chunk)


class _Letter(NamedTuple):
    """An open letter with its record."""

    identity: str
    record: Record
    is_event: bool
    partition: int
    offset: int


def _event(letter: _Letter, decoder: RecordDecoder | None) -> DecodedEvent | Rejection:
    """The event of a letter as today's decoder sees it, or why it is refused."""
    if decoder is None:
        return Rejection(dead_letters.NOT_ASKED_FOR, "the sink does not read the topic any more")
    found = decoder.bounded(decoder.record(letter.record))
    if isinstance(found, Skipped):
        return Rejection(dead_letters.NOT_ASKED_FOR, f"the sink's job does not ask for {found.name}")
    if isinstance(found, DecodedEvent) and found.event_id != letter.identity:
        # Its event would not find the letter, and so not close it.
        return Rejection("malformed id", "the dead letter's identity is not the id of its event")
    return found


def _open(connection: extensions.connection, chunk: Sequence[Chosen], reason: str | None = None) -> Iterator[_Letter]:
    with connection.cursor("open_letters") as cursor:  # a cursor on the server, because a letter may be large
        cursor.itersize = FETCHED
        lost = [letter.identity for letter in chunk if not letter.is_open]
        identities = [letter.identity for letter in chunk]
        cursor.execute(CLAIM, {"sink": chunk[0].sink, "identities": identities, "lost": lost, "reason": reason})
        for identity, key, headers, value, is_event, partition, offset, recorded_ms in cursor:
            record = dead_records.record(key, headers, value, recorded_ms)
            yield _Letter(identity, record, is_event, partition, offset)


def _due(applier: Applier, letters: Iterable[Chosen]) -> Iterator[Chosen]:
    """The letters that are open, and those whose events the result has lost."""
    chosen = list(letters)
    closed = [letter.identity for letter in chosen if not letter.is_open]
    lost = {*applier.lost(closed)} if closed else frozenset[str]()
    return (letter for letter in chosen if letter.is_open or letter.identity in lost)


def _chunks(letters: Iterable[Chosen], at_once: int | None = None) -> Iterator[list[Chosen]]:
    """Chunks of letters of one topic."""
    for _, of_topic in itertools.groupby(letters, key=lambda letter: (letter.topic, letter.topic_id)):
        yield from dead_letters.in_chunks(of_topic, lambda letter: letter.size_bytes, CHUNK_BYTES, at_once or CHUNK)
