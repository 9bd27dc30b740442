"""What an operator does about dead letters: replay them, or discard them. Both work beside the running sink.

Letters are dealt with in chunks, each one transaction that takes the sink's lock first, as the driver's own apply does.
In it a letter's event is applied and its status moved, so that each letter is dealt with once, whoever is killed
when, and however often the command is run. Positions and epoch are the driver's and are left alone.
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
from outbox.sink.applier import Effect, count
from outbox.sink.job import Declared
from outbox.sink.repair.selection import Chosen
from outbox.sink.verdict import Judging, Verdict

CHUNK = 1000
FETCHED = 50  # letters in memory with their bytes
AGAIN = "give the command again: what is done is done, and is not repeated"

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
# By the names of the columns; what is no column is left out.
STAGE = "INSERT INTO staged SELECT one.* FROM jsonb_populate_recordset(NULL::staged, %s::jsonb) AS one"
DISCARD = """
UPDATE dead_letters SET status = 'discarded'
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
    """What became of letters: applied, found to be applied already, or refused again and left open."""

    applied: int = 0
    duplicates: int = 0
    refused: int = 0

    def plus(self, other: Replayed) -> Replayed:
        """Both together."""
        return Replayed(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def effect_of(declared: Declared) -> Effect:
    """What applies the events of a sink whose result is in its database."""
    job, strategy = declared
    return Effect(strategy, job.staged, job.projection)


def replay(
    connection: extensions.connection,
    known: Mapping[str, Declared],
    chosen: Sequence[Chosen],
    *,
    below_floor: bool = False,
    dry_run: bool = False,
    effect_of: Callable[[Declared], Effect] = effect_of,
) -> dict[str, Replayed]:
    """Judge letters by today's contract and apply those that stand it now, by the strategy and projection of their
    sink, which is among ``known``. Returns by sink what became of them. With ``dry_run`` all of it is rolled back.

    With ``below_floor`` it is those that came from below the retention floor, and no others, and they are applied as
    new: no strategy can tell, so the caller has made sure that they never were. Without, they are refused again.

    A letter that is no longer open is left out: each event is applied once. Raises Failure if a sink's strategy is
    unknown, or if the database refuses a chunk, of which then nothing is done; the chunks before it stay.
    """
    _require({letter.sink for letter in chosen}, known)
    done: dict[str, Replayed] = {}
    for sink, letters in itertools.groupby(chosen, key=lambda letter: letter.sink):
        effect, judge = effect_of(known[sink]), known[sink].job.judge
        done[sink] = Replayed()
        with database_errors(connection, f"sink {sink}", "refused the replay", AGAIN):
            with connection, connection.cursor() as cursor:
                cursor.execute(fence.SESSION)
                effect.prepare(cursor)
            for chunk in _chunks(letters):
                with connection:
                    done[sink] = done[sink].plus(_replay(connection, effect, judge, chunk, below_floor))
                    if dry_run:
                        connection.rollback()
            with connection, connection.cursor() as cursor:
                effect.end(cursor)
    return done


def discard(connection: extensions.connection, chosen: Sequence[Chosen], *, dry_run: bool = False) -> dict[str, int]:
    """Give letters up: their events are never applied, also not if they come again. Returns how many, by sink.

    Raises Failure if the database refuses it.
    """
    done: dict[str, int] = {}
    for sink, letters in itertools.groupby(chosen, key=lambda letter: letter.sink):
        done[sink] = 0
        with database_errors(connection, f"sink {sink}", "does not let them be discarded", AGAIN):
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
    connection: extensions.connection, effect: Effect, judge: Judging, chunk: Sequence[Chosen], below_floor: bool
) -> Replayed:
    with connection.cursor() as cursor:
        fence.lock(cursor, effect.name)
        rows: list[dict[str, Any]] = []
        verdicts: dict[str, Verdict] = {}
        for letter in _claim(connection, chunk, dead_letters.BELOW_FLOOR if below_floor else None):
            found = _judged(judge, letter)
            if isinstance(found, Verdict):
                verdicts[letter.identity] = found
            else:
                rows.append(found)
        dead_letters.keep_verdicts(cursor, effect.name, verdicts)
        cursor.execute(STAGE, [json.dumps(rows)])
        applied, refused = effect.take(
            cursor, chunk[0].topic, chunk[0].topic_id, is_replay=True, is_below_floor=below_floor
        )
        duplicates = len(rows) - applied - refused
        count(cursor, effect.name, applied=applied, duplicates=duplicates)
        return Replayed(applied, duplicates, refused + len(verdicts))


def _claim(connection: extensions.connection, chunk: Sequence[Chosen], reason: str | None) -> Iterator[Claimed]:
    with connection.cursor("claimed") as cursor:  # on the server, as a letter may be as big as a record
        cursor.itersize = FETCHED
        cursor.execute(CLAIM, {**_names(chunk), "reason": reason})
        yield from map(Claimed._make, cursor)


def _judged(judge: Judging, letter: Claimed) -> Verdict | dict[str, Any]:
    """The staged row of a letter, or what is wrong with it."""
    if letter.event is not None:
        return letter.event
    headers = dead_letters.headers(letter.headers or ())
    found = judge.judge(_bytes(letter.key), headers, _bytes(letter.value), letter.recorded_ms)
    if isinstance(found, Verdict):
        return found
    if letter.event_id != letter.identity:  # it would not be found by its event, and so not be closed
        return Verdict("malformed id", "the letter is not kept by the id of its event")
    return {**found, "event_id": letter.event_id, "partition": letter.partition, "offset": letter.offset}


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
            f"there is no strategy called {', '.join(unknown)} any more, so its letters cannot be replayed",
            f"choose by --sink among {', '.join(known)}",
        )
