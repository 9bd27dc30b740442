"""What an operator does about dead letters: replay them, or discard them. Both work beside the running sink.

Letters are dealt with in chunks, each one transaction that takes the sink's lock first, as the driver's own apply does.
In it a letter's event is applied and its status changed, so that each letter is dealt with once, whoever is killed
when, and however often the command is run. Positions and epoch are the driver's and stay as they are.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from psycopg2 import extensions

from outbox.base.database import database_errors
from outbox.base.errors import Failure
from outbox.sink import dead_letters, fence
from outbox.sink.postgres.applier import Applier
from outbox.sink.records import Record, RecordDecoder, Rejection
from outbox.sink.repair.selection import Chosen
from outbox.sink.spec import SinkSpec
from outbox.sink.writer import count

CHUNK = 1000
FETCHED = 50  # letters in memory with their bytes
AGAIN = "run the command again: what is done is done, and is not repeated"

# Locked one after the other as they are fetched; a letter that is no longer open is not found.
CLAIM = """
SELECT identity, key, headers, value, event, event_id, partition, "offset",
       round(extract(epoch FROM coalesce(recorded_at, first_seen_at)) * 1000)::bigint
  FROM dead_letters
 WHERE sink = %(sink)s AND identity = ANY(%(identities)s) AND status = 'open'
   AND (reason = %(reason)s OR %(reason)s IS NULL)
 ORDER BY partition, "offset"
   FOR UPDATE
"""
DISCARD = """
UPDATE dead_letters SET status = 'discarded', last_seen_at = now()
 WHERE sink = %(sink)s AND identity = ANY(%(identities)s) AND status = 'open'
"""


class Claimed(NamedTuple):
    """A row of CLAIM."""

    identity: str
    key: memoryview | None
    headers: list[dict[str, Any]] | None
    value: memoryview | None
    event: dict[str, Any] | None
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
        rows: list[dict[str, Any]] = []
        rejections: dict[str, Rejection] = {}
        for letter in _claim(connection, chunk, dead_letters.OLDER_THAN_HORIZON if older_than_horizon else None):
            found = _validated(decoder, letter)
            if isinstance(found, Rejection):
                rejections[letter.identity] = found
            else:
                rows.append(found)
        dead_letters.update_reasons(cursor, applier.name, rejections)
        applier.stage(cursor, json.dumps(rows))
        applied, rejected = applier.replay(
            cursor, chunk[0].topic, chunk[0].topic_id, older_than_horizon=older_than_horizon
        )
        duplicates = len(rows) - applied - rejected
        count(cursor, applier.name, applied=applied, duplicates=duplicates)
        return Replayed(applied, duplicates, rejected + len(rejections))


def _claim(connection: extensions.connection, chunk: Sequence[Chosen], reason: str | None) -> Iterator[Claimed]:
    with connection.cursor("claimed") as cursor:  # on the server: a letter may be as big as a record
        cursor.itersize = FETCHED
        cursor.execute(CLAIM, {**_names(chunk), "reason": reason})
        yield from map(Claimed._make, cursor)


def _validated(decoder: RecordDecoder, letter: Claimed) -> Rejection | dict[str, Any]:
    """The row of a letter's event as JSON, or why the letter is still invalid."""
    if letter.event is not None:
        return letter.event
    headers = dead_letters.headers(letter.headers or ())
    found = decoder.record(Record(_bytes(letter.key), headers, _bytes(letter.value), letter.recorded_ms))
    if isinstance(found, Rejection):
        return found
    if letter.event_id != letter.identity:  # its event would not find the letter, and so not close it
        return Rejection("malformed id", "the dead letter is not kept by the id of its event")
    return {**decoder.as_json(found), "partition": letter.partition, "offset": letter.offset}


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
