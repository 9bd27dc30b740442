"""Retention of `processed_events`: a day is forgotten once there is evidence that none of its events can come again.

An event goes from the outbox table and the write-ahead log to the topic, and from there, if it cannot be applied, to a
dead letter. It may come again from each: the table in a snapshot, the log as far as the slot has not confirmed it, the
topic in a re-read, the letter in a replay. What is not applied yet by a sink that is behind is still on the topic. An
event is further on before it goes from where it was; so the places are read in this order, and one that has left a
place just before that was read is met in a later one:

1. Transactions that have written events when we look, until they have ended: no event that is older than our look is
   invisible any more, and all are in the log before the position that we note then.
2. The outbox table: the oldest event it has.
3. The log, until the slot has confirmed that position. Then whatever is read from it again is younger than our look.
   Confirmed short of it, it may hold anything, be its rows pruned or not: then nothing is dropped.
4. The topic, as readers of committed records see it. What waits behind an open Kafka transaction is minutes old.
5. The open dead letters of all sinks.

Nothing old comes into any of these places later but from one before it. Today and yesterday are kept anyway, so an id
may be a day older than its row: clocks that differ, ids made by a client.

Should an old event come none the less, it is not applied twice: what is forgotten lies below the floor, which is raised
in the transaction that forgets, and below the floor events are set aside. So ids below it are no evidence: there is
nothing to keep for them. Ids that are no UUIDv7 are never applied, and are none either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any, NamedTuple
from uuid import UUID

import psycopg2
from confluent_kafka import Message
from psycopg2 import extensions

from outbox.base.database import connect, database_errors
from outbox.base.errors import Failure
from outbox.base.settings import Settings, SinkRole, SourceRole
from outbox.base.wait import WaitTimeoutError, wait_for
from outbox.kafka import records, topics
from outbox.relay import connectors, slot
from outbox.sink import fence, verdict

WRITERS_TIMEOUT_S = 30.0
# Without exactly-once Connect notes its offsets, and the slot is confirmed, once a minute (offset.flush.interval.ms).
CONFIRM_TIMEOUT_S = 90.0
STIR_EVERY_S = 0.5
# Longer than the server's deadlock_timeout of 1 s, after which an autovacuum of a day gives way.
LOCK_TIMEOUT_S = 2
DROP_TIMEOUT_S = 60.0

EPOCH = date(1970, 1, 1)
Report = Callable[[str], None]

# Whoever has written an event keeps this lock until the end of his transaction, and every role may see it.
WRITERS = """
SELECT virtualtransaction FROM pg_locks
 WHERE locktype = 'relation' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
   AND relation = 'public.outbox'::regclass AND mode = 'RowExclusiveLock' AND granted
"""
OUTBOX = "SELECT id FROM outbox WHERE uuid_extract_version(id) = 7 AND id >= %s ORDER BY id LIMIT 1"
LETTERS = """
SELECT event_id FROM dead_letters
 WHERE status = 'open' AND uuid_extract_version(event_id) = 7 AND event_id >= %s ORDER BY event_id LIMIT 1
"""
FLOOR = "SELECT horizon, first_uuid_of((now() AT TIME ZONE 'UTC')::date - 1) FROM dedup_horizon"
BELOW = """
SELECT name, bound, estimated_rows, bytes FROM processed_days WHERE bound <= first_uuid_of(%s) ORDER BY bound
"""
DROP = "SELECT name, bound, estimated_rows, bytes FROM drop_processed_events(%s)"


@dataclass(frozen=True)
class Evidence:
    """What one place may still bring: ``oldest`` is a bound of the ids that may come again from it; None if none may.

    ``note`` says why it is a bound only, where it is no event's id.
    """

    place: str
    oldest: UUID | None = None
    note: str = ""

    def __str__(self) -> str:
        if self.oldest is None:
            return f"{self.place}: holds no event"
        return f"{self.place}: {self.note or f'holds {self.oldest}, of {day_of(self.oldest)}'}"


class Day(NamedTuple):
    """A partition of processed_events: the ids below ``bound`` and not below that of the day before."""

    name: str
    bound: UUID
    estimated_rows: int | None
    bytes: int

    def __str__(self) -> str:
        rows = "" if self.estimated_rows is None else f"about {self.estimated_rows:,} rows, "
        return f"{self.name}: {rows}{self.bytes / 2**20:,.1f} MiB"


@dataclass(frozen=True)
class Retired:
    """What was dropped, and why not more. In a dry run, what would be dropped."""

    evidence: tuple[Evidence, ...]
    dropped: tuple[Day, ...] = ()

    @property
    def upto(self) -> date:
        """The first day that has to be kept."""
        return day_of(self._lowest)

    @property
    def held_by(self) -> list[Evidence]:
        """What it has to be kept for."""
        return [found for found in self.evidence if found.oldest == self._lowest]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "evidence": [str(found) for found in self.evidence],
            "kept_from": str(self.upto),
            "dropped": [day.name for day in self.dropped],
        }

    @property
    def _lowest(self) -> UUID:
        return min(found.oldest for found in self.evidence if found.oldest is not None)


def retire(
    settings: Settings,
    *,
    dry_run: bool = False,
    report: Report = lambda _: None,
    stir: Callable[[], object] = lambda: None,
) -> Retired:
    """Drop the days that nothing can bring again, all in one transaction, beside running writers, relay and sinks.

    ``report`` is given a line for each piece of evidence and each day. ``stir`` commits something that the relay reads,
    as a slot is confirmed by what comes through it, and on a quiet ledger nothing does. It is called again and again
    until the slot has confirmed enough: Debezium confirms a transaction when it has seen the next.

    Raises Failure, with nothing changed, if a place cannot be read, if there is no slot or it was invalidated, or if
    the sinks leave no gap between their transactions within `DROP_TIMEOUT_S`.
    """
    evidence = []
    for found in gather(settings, stir):
        report(str(found))
        evidence.append(found)
    upto = Retired(tuple(evidence)).upto
    days = below(settings, upto)
    if days and not dry_run:
        days = drop(settings, upto)
    for day in days:
        report(f"{'would drop' if dry_run else 'dropped'} {day}")
    return Retired(tuple(evidence), days)


def gather(settings: Settings, stir: Callable[[], object] = lambda: None) -> Iterator[Evidence]:
    """The evidence, place by place, in the order that the module's head gives the reason for.

    Raises Failure if a place cannot be read, or if there is no slot or it was invalidated.
    """
    floor, kept_from = (UUID(found) for found in _row(settings, SinkRole.AUDITOR, FLOOR) or ())
    yield _writers(settings, floor)
    position = slot.end_of_log(settings)
    yield Evidence("outbox table", _oldest(settings, SourceRole.AUDITOR, OUTBOX, floor))
    yield _log(settings, floor, position, stir)
    yield Evidence("topic", _oldest_on_topic(settings, floor))
    yield Evidence("open dead letters", _oldest(settings, SinkRole.AUDITOR, LETTERS, floor))
    yield Evidence("clock", kept_from, "today and yesterday are kept")


def below(settings: Settings, upto: date) -> tuple[Day, ...]:
    """The partitions of the days before this one."""
    with closing(connect(settings, SinkRole.PRUNER)) as connection, _told(connection), connection.cursor() as cursor:
        return _days(cursor, BELOW, upto)


def drop(settings: Settings, upto: date) -> tuple[Day, ...]:
    """Raise the floor to a day and drop the partitions below it, in one transaction.

    Under the lock of every sink that there is: dropping waits for whoever reads, and all others then wait behind it. A
    sink that is new has nothing to be forgotten. It is given up after a moment and tried again, so that no sink has to
    wait for the long batch of another. Raises Failure, with nothing changed, if that does not work in time.
    """
    held = ""
    with closing(connect(settings, SinkRole.PRUNER)) as connection, _told(connection):

        def attempt() -> list[tuple[Day, ...]]:
            nonlocal held
            try:
                with connection, connection.cursor() as cursor:
                    cursor.execute("SELECT set_config('lock_timeout', %s, true)", [f"{LOCK_TIMEOUT_S}s"])
                    cursor.execute("SELECT name FROM sinks ORDER BY name")
                    for (sink,) in cursor.fetchall():
                        held = f"sink {sink} is in a transaction"
                        fence.lock(cursor, sink)
                    held = "somebody uses processed_events"
                    return [_days(cursor, DROP, upto)]
            except psycopg2.errors.LockNotAvailable:
                return []

        try:
            (days,) = wait_for("the sinks to be between two batches", attempt, timeout_s=DROP_TIMEOUT_S, poll_s=0.2)
        except WaitTimeoutError:
            raise Failure(f"no day was dropped: {held} and does not end it", "give the command again") from None
    return days


def day_of(event_id: UUID) -> date:
    """The day of the time inside a UUIDv7, in UTC; the last that there is, for one beyond it."""
    return EPOCH + min(timedelta(milliseconds=event_id.int >> 80), date.max - EPOCH)


def _writers(settings: Settings, floor: UUID) -> Evidence:
    place = "transactions that write events"
    with closing(connect(settings, SourceRole.AUDITOR)) as connection, _told(connection):
        connection.autocommit = True

        def writing() -> set[str]:
            with connection.cursor() as cursor:
                cursor.execute(WRITERS)
                return {transaction for (transaction,) in cursor}

        begun = writing()
        try:
            wait_for("them to end", lambda: not begun & writing(), timeout_s=WRITERS_TIMEOUT_S)
        except WaitTimeoutError:
            return Evidence(place, floor, "one goes on and on, and what it has written is not to be seen yet")
    return Evidence(place)


def _log(settings: Settings, floor: UUID, position: int, stir: Callable[[], object]) -> Evidence:
    place = "write-ahead log"

    def is_confirmed() -> bool:
        found = slot.read(settings)
        if found is None or found.wal_status == "lost":
            raise Failure(
                f"slot {settings.connector} {'is not there' if found is None else 'was invalidated'}: what the relay "
                "will send is unknown, so no day was dropped",
                "`outbox connect apply`" if found is None else connectors.load(settings).start_again,
            )
        if found.confirmed_lsn < position:
            stir()
            return False
        return True

    try:
        wait_for("the slot to be confirmed", is_confirmed, timeout_s=CONFIRM_TIMEOUT_S, poll_s=STIR_EVERY_S)
    except WaitTimeoutError:
        return Evidence(place, floor, f"slot {settings.connector} has not confirmed what was written before we looked")
    return Evidence(place)


def _oldest_on_topic(settings: Settings, floor: UUID) -> UUID | None:
    within = topics.watermarks(settings, settings.topic)
    ids = (_event_id(message) for message in records.read(settings, settings.topic, within))
    # As text, which sorts as they do: a topic has many.
    found = min((one for one in ids if one is not None and one >= str(floor)), default=None)
    return None if found is None else UUID(found)


def _event_id(message: Message) -> str | None:
    """The id by which a sink would apply the record."""
    headers: dict[str, Any] = dict(message.headers() or [])
    text = (headers.get("id") or b"").decode(errors="replace")
    return text if verdict.UUID.fullmatch(text) and verdict.UUID_V7.fullmatch(text) else None


def _days(cursor: extensions.cursor, query: str, upto: date) -> tuple[Day, ...]:
    cursor.execute(query, [upto])
    return tuple(Day(name, UUID(bound), rows, size) for name, bound, rows, size in cursor)


def _oldest(settings: Settings, role: SourceRole | SinkRole, query: str, floor: UUID) -> UUID | None:
    row = _row(settings, role, query, str(floor))
    return None if row is None else UUID(row[0])


def _row(settings: Settings, role: SourceRole | SinkRole, query: str, *parameters: object) -> tuple[Any, ...] | None:
    with closing(connect(settings, role)) as connection, _told(connection), connection.cursor() as cursor:
        cursor.execute(query, parameters or None)
        return cursor.fetchone()


def _told(connection: extensions.connection) -> AbstractContextManager[None]:
    return database_errors(connection, "retention", "does not tell or drop what it should", "give the command again")
