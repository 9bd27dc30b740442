"""What an operator does about dead letters: replay them, or discard them. Both work beside the running sink.

Letters are dealt with in chunks, each one transaction that takes the sink's lock first, as the driver's own apply does.
In it a letter's event is applied and its status changed, so that each letter is dealt with once, whoever is killed
when, and however often the command is run. Positions and epoch are the driver's and stay as they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import date
from typing import Any, NamedTuple

import pyarrow as pa
from psycopg2 import extensions

from outbox.base.database import database_errors
from outbox.base.errors import Failure
from outbox.sink import dead_letters, fence, partitions
from outbox.sink.applier import Applier
from outbox.sink.records import Event, Record, RecordDecoder, Rejection
from outbox.sink.repair.selection import Chosen
from outbox.sink.spec import SinkSpec
from outbox.sink.writer import count

CHUNK = 1000
FETCHED = 50  # letters in memory with their bytes
STATEMENT_MAX_BYTES = 4 << 20  # of events as JSON; a single larger one is a statement of its own
AGAIN = "run the command again: what is done is done, and is not repeated"

OPEN = """
SELECT identity, key, headers, value, event IS NOT NULL, event_id, partition, "offset",
       round(extract(epoch FROM coalesce(recorded_at, first_seen_at)) * 1000)::bigint
  FROM dead_letters
 WHERE sink = %(sink)s AND identity = ANY(%(identities)s) AND status = 'open'
   AND (reason = %(reason)s OR %(reason)s IS NULL)
 ORDER BY partition, "offset"
"""
# Locks each letter when it is fetched. A letter that was closed meanwhile is left out.
CLAIM = f"{OPEN} FOR UPDATE"
# Inside Postgres, where numbers keep all their digits.
STAGE_EVENTS = """
INSERT INTO batch
SELECT one.*
  FROM dead_letters AS letter, jsonb_populate_record(NULL::batch, letter.event) AS one
 WHERE letter.sink = %(sink)s AND letter.identity = ANY(%(identities)s)
"""
DISCARD = """
UPDATE dead_letters SET status = 'discarded', last_seen_at = now()
 WHERE sink = %(sink)s AND identity = ANY(%(identities)s) AND status = 'open'
"""


class Opened(NamedTuple):
    """A row of OPEN or CLAIM."""

    identity: str
    key: memoryview | None
    headers: list[dict[str, Any]] | None
    value: memoryview | None
    is_event: bool
    event_id: str | None
    partition: int
    offset: int
    recorded_ms: int


class Replayed(NamedTuple):
    """What became of letters: applied, found to be applied already, or rejected again and left open."""

    applied: int = 0
    duplicates: int = 0
    rejected: int = 0

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

    With ``older_than_horizon`` it is the letters older than the deduplication horizon, and no others, and they are
    applied as new: no strategy can know, so the caller has made sure that they never were. Without it they are rejected
    again.

    A letter that is no longer open is left out: each event is applied once. Raises Failure if a sink's strategy is
    unknown, or if the database refuses a chunk, of which then nothing is done; the chunks before it stay.
    """
    _require({letter.sink for letter in chosen}, known)
    done: dict[str, Replayed] = {}
    for sink, letters in itertools.groupby(chosen, key=lambda letter: letter.sink):
        applier, decoder = applier_of(known[sink]), known[sink].job.decoder
        done[sink] = Replayed()
        with database_errors(connection, f"sink {sink}", "refused the replay", AGAIN):
            with connection, connection.cursor() as cursor:
                cursor.execute(fence.SESSION)
                applier.prepare(cursor)
            for chunk in _chunks(letters):
                if applier.strategy.remembers_ids:  # before the transaction: a partition costs locks
                    partitions.ensure(connection, _days(connection, decoder, chunk))
                with connection:
                    done[sink] = done[sink].plus(_replay(connection, applier, decoder, chunk, older_than_horizon))
                    if dry_run:
                        connection.rollback()
            with connection, connection.cursor() as cursor:
                applier.end(cursor)
    return done


def discard(connection: extensions.connection, chosen: Sequence[Chosen], *, dry_run: bool = False) -> dict[str, int]:
    """Give letters up: their events are never applied, even if they are repeated. Returns how many, by sink.

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
                    cursor.execute(DISCARD, _names(chunk))
                    done[sink] += cursor.rowcount
                    if dry_run:
                        connection.rollback()
    return done


def _replay(
    connection: extensions.connection,
    applier: Applier,
    decoder: RecordDecoder,
    chunk: Sequence[Chosen],
    older_than_horizon: bool,
) -> Replayed:
    with connection.cursor() as cursor:
        fence.lock(cursor, applier.name)
        events: list[str] = []  # identities of letters that hold a valid event
        rejections: dict[str, Rejection] = {}
        staging = _Staging(cursor, applier)
        reason = dead_letters.OLDER_THAN_HORIZON if older_than_horizon else None
        for letter in _open(connection, chunk, CLAIM, reason):
            found = None if letter.is_event else _validated(decoder, letter)
            if found is None:
                events.append(letter.identity)
            elif isinstance(found, Rejection):
                rejections[letter.identity] = found
            else:
                staging.add(decoder.as_json(found, letter.partition, letter.offset))
        staging.flush()
        if events:
            cursor.execute(STAGE_EVENTS, {"sink": applier.name, "identities": events})
        dead_letters.update_reasons(cursor, applier.name, rejections)
        applied, rejected = applier.replay(
            cursor, chunk[0].topic, chunk[0].topic_id, older_than_horizon=older_than_horizon
        )
        duplicates = len(events) + staging.count - applied - rejected
        count(cursor, applier.name, applied=applied, duplicates=duplicates)
        return Replayed(applied, duplicates, rejected + len(rejections))


class _Staging:
    """Stages events, in statements of a bounded size."""

    def __init__(self, cursor: extensions.cursor, applier: Applier) -> None:
        self._cursor = cursor
        self._applier = applier
        self._waiting: list[str] = []
        self._size_bytes = 0
        self.count = 0

    def add(self, event: str) -> None:
        """Stage one more event, now or later."""
        if self._size_bytes + len(event) > STATEMENT_MAX_BYTES:
            self.flush()
        self._waiting.append(event)
        self._size_bytes += len(event)
        self.count += 1

    def flush(self) -> None:
        """Stage those that wait."""
        if self._waiting:
            self._applier.stage(self._cursor, f"[{', '.join(self._waiting)}]")
        self._waiting.clear()
        self._size_bytes = 0


def _days(connection: extensions.connection, decoder: RecordDecoder, chunk: Sequence[Chosen]) -> set[date]:
    """The days of the events that are valid now and were not before: the strategy will remember their ids."""
    with connection:
        found = [_validated(decoder, letter) for letter in _open(connection, chunk, OPEN) if not letter.is_event]
    return partitions.days(pa.array([one.event_id for one in found if isinstance(one, Event)], pa.string()))


def _open(
    connection: extensions.connection, chunk: Sequence[Chosen], query: str, reason: str | None = None
) -> Iterator[Opened]:
    with connection.cursor("open_letters") as cursor:  # a cursor on the server, because a letter may be large
        cursor.itersize = FETCHED
        cursor.execute(query, {**_names(chunk), "reason": reason})
        yield from map(Opened._make, cursor)


def _validated(decoder: RecordDecoder, letter: Opened) -> Event | Rejection:
    """The event of a letter that keeps a record, or why the record is still invalid."""
    headers = dead_letters.headers(letter.headers or ())
    found = decoder.record(Record(_bytes(letter.key), headers, _bytes(letter.value), letter.recorded_ms))
    if isinstance(found, Event) and found.event_id != letter.identity:
        # Its event would not find the letter, and so not close it.
        return Rejection("malformed id", "the dead letter is not kept by the id of its event")
    return found


def _bytes(content: memoryview | None) -> bytes | None:
    return None if content is None else bytes(content)


def _chunks(letters: Iterator[Chosen]) -> Iterator[list[Chosen]]:
    """In each the letters of one topic."""
    for _, of_topic in itertools.groupby(letters, key=lambda letter: (letter.topic, letter.topic_id)):
        while chunk := list(itertools.islice(of_topic, CHUNK)):
            yield chunk


def _names(chunk: Sequence[Chosen]) -> dict[str, Any]:
    return {"sink": chunk[0].sink, "identities": [letter.identity for letter in chunk]}


def _require(sinks: set[str], known: Collection[str]) -> None:
    unknown = sorted(sinks.difference(known))
    if unknown:
        raise Failure(
            f"there is no strategy called {', '.join(unknown)} any more, so its dead letters cannot be replayed",
            f"choose by --sink among {', '.join(known)}",
            code="strategy-unknown",
        )
