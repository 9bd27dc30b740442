"""Evidence for retention: the places that may bring an old event again, and how old their events are.

An event moves from the outbox table and the write-ahead log to a topic, and from there, if it cannot be applied, to a
dead letter. It may come again from each place: the table in a snapshot, the log as far as the slot has not confirmed
it, a topic in a re-read, the dead letter in a replay. Events that a slow sink has not applied are still on their topic.

`gather` reads the places in the order in which events move, because an event leaves a place only when it is in the next
one: an event that left a place just before it was read is found in a later place.

1. Transactions that have written events, until they have ended. Then no event older than the first look is invisible,
   and all of them are in the log before the position that is noted then.
2. The outbox table: its oldest event.
3. The log, until the slot has confirmed that position. Then everything read from it again is younger than the first
   look. If the slot has confirmed less, the log may hold anything, even after the rows were pruned.
4. Each topic that may hold events (`event_topics`), as readers of committed records see it, once
   the transactions have ended that were open there. One that stays open hides records of any age.
5. The open dead letters of all sinks.

Old events reach one of these places later only from an earlier one. Today and yesterday are kept in any case, so an id
may be a day older than its row: clocks that differ, ids made by a client.

Ids below the deduplication horizon are no evidence: they are forgotten already, and their events are set aside. Ids
that are no UUIDv7 are no evidence either, because their events are never applied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any
from uuid import UUID

from confluent_kafka import Message
from psycopg2 import extensions

from outbox.base.database import connect, database_errors
from outbox.base.errors import Failure
from outbox.base.settings import Role, Settings, SinkRole, SourceRole
from outbox.base.wait import WaitTimeoutError, wait_for
from outbox.events import catalog
from outbox.kafka import records, topics
from outbox.kafka.records import headers_of
from outbox.relay import connectors, slot
from outbox.sink.decoding.decoder import UUID_V7
from outbox.sink.decoding.ids import EPOCH, day_of

WRITERS_TIMEOUT_S = 30.0
TOPIC_TIMEOUT_S = 75.0  # for transactions: Connect's time out after a minute, and a broker ends them within 10 s
# Without exactly-once Connect stores its offsets, and the slot is confirmed, once a minute (offset.flush.interval.ms).
CONFIRM_TIMEOUT_S = 90.0
NUDGE_EVERY_S = 0.5

# A transaction that has written an event holds this lock until it ends, and every role may see it.
WRITERS = """
SELECT virtualtransaction FROM pg_locks
 WHERE locktype = 'relation' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
   AND relation = 'public.outbox'::regclass AND mode = 'RowExclusiveLock' AND granted
"""
OUTBOX = "SELECT id FROM public.outbox WHERE uuid_extract_version(id) = 7 AND id >= %s ORDER BY id LIMIT 1"
DEAD_LETTERS = """
SELECT event_id FROM public.dead_letters
 WHERE status = 'open' AND uuid_extract_version(event_id) = 7 AND event_id >= %s ORDER BY event_id LIMIT 1
"""
READ_TOPICS = "SELECT DISTINCT topic FROM public.positions"
HORIZON = "SELECT horizon, (now() AT TIME ZONE 'UTC')::date - 1 FROM public.dedup_horizon"

Nudge = Callable[[], object]


@dataclass(frozen=True)
class Evidence:
    """The ids that one place may still bring: none below ``oldest``; None if it brings nothing.

    ``note`` explains ``oldest`` where it is not the id of an event.
    """

    place: str
    oldest: UUID | None = None
    note: str = ""

    @property
    def day(self) -> date:
        """The first day (UTC) whose ids have to be kept for it."""
        return date.max if self.oldest is None else day_of(self.oldest)

    def __str__(self) -> str:
        if self.oldest is None:
            return f"{self.place}: holds no event"
        return f"{self.place}: {self.note or f'holds {self.oldest}, of {self.day}'}"


def horizon(settings: Settings) -> tuple[UUID, date]:
    """The deduplication horizon, and yesterday (UTC) by the clock of the sink database."""
    row = _row(settings, SinkRole.AUDITOR, HORIZON)
    assert row is not None  # noqa: S101 - the migration has inserted it
    return UUID(row[0]), row[1]


def gather(settings: Settings, wanted: date, nudge: Nudge = lambda: None) -> Iterator[Evidence]:
    """The evidence of each place, in the order in which events move. It ends with the first place that holds an event
    of a day before ``wanted``. A place where a glance finds one, without waiting, is the only evidence.

    ``nudge`` commits something that the relay reads, because a slot is confirmed by what comes through it: Debezium
    confirms a transaction when it has seen the next. It is called again and again until the slot has confirmed enough.

    Raises Failure if a place cannot be read, or if the slot does not exist or was invalidated.
    """
    floor, yesterday = horizon(settings)
    for found in _at_a_glance(settings, floor, wanted):
        if found.day < wanted:
            yield found
            return
    for found in _in_order(settings, floor, wanted, nudge):
        yield found
        if found.day < wanted:
            return
    yield Evidence("clock", first_uuid(yesterday), "today and yesterday are kept")


def event_topics(settings: Settings, *, sinks: bool = True) -> list[str]:
    """The topics that may hold events of the outbox, whether they exist or not: those of the catalog, then others.

    An aggregate can be moved to another topic. Its older events stay on the former one: a topic that sinks have read,
    or the aggregate's default topic. ``sinks=False`` does not ask the sink database, which a chain may not have.
    """
    declared = sorted(catalog.of_project(settings).topics)
    former = connectors.default_topics(settings)
    if sinks:
        with connected(settings, SinkRole.PRUNER) as connection, connection.cursor() as cursor:
            cursor.execute(READ_TOPICS)
            former |= {topic for (topic,) in cursor}
    captured = {topic for connector in connectors.others(settings) for topic in connector.topics}  # hold no events
    return [*declared, *sorted(former - captured - {*declared})]


@contextmanager
def connected(settings: Settings, role: Role) -> Iterator[extensions.connection]:
    """A connection as a role, for retention. Raises Failure if the database refuses a statement of the block."""
    with (
        closing(connect(settings, role)) as connection,
        database_errors(connection, "retention", "refused", "run the command again"),
    ):
        yield connection


def first_uuid(day: date) -> UUID:
    """The lowest UUID with a time on this day (UTC)."""
    return UUID(int=((day - EPOCH) // timedelta(milliseconds=1)) << 80)


def _at_a_glance(settings: Settings, floor: UUID, wanted: date) -> Iterator[Evidence]:
    yield _outbox(settings, floor)
    yield _dead_letters(settings, floor)
    for topic in _topics(settings):
        ends = topics.watermarks(settings, topic).items()
        firsts = {partition: (first, min(first + 1, end)) for partition, (first, end) in ends}
        yield _topic(settings, topic, floor, wanted, firsts)


def _in_order(settings: Settings, floor: UUID, wanted: date, nudge: Nudge) -> Iterator[Evidence]:
    yield _writers(settings, floor)
    position = slot.end_of_log(settings)
    yield _outbox(settings, floor)
    yield _log(settings, floor, position, nudge)
    for topic in _topics(settings):
        yield _whole_topic(settings, topic, floor, wanted)
    yield _dead_letters(settings, floor)


def _topics(settings: Settings) -> list[str]:
    """Declared topics must exist; one that has never had an event would hide that `connect apply` was forgotten."""
    declared = catalog.of_project(settings).topics
    names = event_topics(settings)
    existing = topics.existing(settings, names)
    return [name for name in names if name in declared or name in existing]


def _writers(settings: Settings, floor: UUID) -> Evidence:
    place = "transactions that write events"
    with connected(settings, SourceRole.AUDITOR) as connection:
        connection.autocommit = True

        def writing() -> set[str]:
            with connection.cursor() as cursor:
                cursor.execute(WRITERS)
                return {transaction for (transaction,) in cursor}

        begun = writing()
        try:
            wait_for("them to end", lambda: not begun & writing(), timeout_s=WRITERS_TIMEOUT_S)
        except WaitTimeoutError:
            return Evidence(place, floor, "one does not end, and its events cannot be seen yet")
    return Evidence(place)


def _outbox(settings: Settings, floor: UUID) -> Evidence:
    return Evidence("outbox table", _oldest(settings, SourceRole.AUDITOR, OUTBOX, floor))


def _log(settings: Settings, floor: UUID, position: int, nudge: Nudge) -> Evidence:
    place = "write-ahead log"

    def is_confirmed() -> bool:
        found = slot.read(settings)
        if found is None:
            raise Failure(
                f"slot {settings.connector} does not exist, so what the relay will send is unknown",
                "`outbox connect apply`",
                code="slot-missing",
            )
        if found.wal_status == "lost":
            raise Failure(
                f"slot {settings.connector} was invalidated, so what the relay will send is unknown",
                connectors.load(settings).start_again,
                code="slot-invalidated",
            )
        if found.confirmed_lsn < position:
            nudge()
            return False
        return True

    try:
        wait_for("the slot to be confirmed", is_confirmed, timeout_s=CONFIRM_TIMEOUT_S, poll_s=NUDGE_EVERY_S)
    except WaitTimeoutError:
        return Evidence(place, floor, f"slot {settings.connector} has not confirmed everything written before the look")
    return Evidence(place)


def _whole_topic(settings: Settings, topic: str, floor: UUID, wanted: date) -> Evidence:
    try:
        ends = topics.wait_decided(settings, topic, TOPIC_TIMEOUT_S)
    except WaitTimeoutError:
        return Evidence(f"topic {topic}", floor, "a transaction on it does not end, and its events cannot be seen yet")
    firsts = topics.first_offsets(settings, topic)
    return _topic(settings, topic, floor, wanted, {number: (firsts[number], end) for number, end in ends.items()})


def _topic(settings: Settings, topic: str, floor: UUID, wanted: date, within: records.Within) -> Evidence:
    """Read until an event of a day before ``wanted`` is found: how much older others are does not matter then."""
    oldest, lowest, bound = None, str(floor), str(first_uuid(wanted))  # as text, which sorts in the same way
    for message in records.read(settings, topic, within):
        event_id = deduplication_id(message)
        if event_id is None or event_id < lowest or (oldest is not None and event_id >= oldest):
            continue
        oldest = event_id
        if oldest < bound:
            break
    return Evidence(f"topic {topic}", None if oldest is None else UUID(oldest))


def _dead_letters(settings: Settings, floor: UUID) -> Evidence:
    return Evidence("open dead letters", _oldest(settings, SinkRole.AUDITOR, DEAD_LETTERS, floor))


def deduplication_id(message: Message) -> str | None:
    """The id by which a sink would apply the record."""
    text = (dict(headers_of(message)).get("id") or b"").decode(errors="replace")
    return text if UUID_V7.fullmatch(text) else None


def _oldest(settings: Settings, role: Role, query: str, floor: UUID) -> UUID | None:
    row = _row(settings, role, query, str(floor))
    return None if row is None else UUID(row[0])


def _row(settings: Settings, role: Role, query: str, *parameters: object) -> tuple[Any, ...] | None:
    with connected(settings, role) as connection, connection.cursor() as cursor:
        cursor.execute(query, parameters or None)
        return cursor.fetchone()
