"""Retention in the sink database: forget what nothing can bring again.

Sinks recognise a duplicate by what they have kept of its event. So an id is forgotten only with evidence that no place
can bring its event again. The *deduplication horizon* is the end of what is forgotten: it is raised in the transaction
that begins to forget, and events below it are set aside. So an event that comes against the evidence is not applied
twice; it becomes a dead letter. Ids are forgotten by days: whole partitions of processed_events are dropped.

Evidence
    An event moves from the outbox table and the write-ahead log to a topic, and from there, if it cannot be applied, to
    a dead letter. It may come again from each place: the table in a snapshot, the log as far as the slot has not
    confirmed it, a topic in a re-read, the dead letter in a replay. `gather` reads the places in the order in which
    events move, because an event leaves a place only when it is in the next one: an event that left a place just before
    it was read is found in a later place.

    1. Transactions that have written events, until they have ended. Then no event older than the first look is
       invisible, and all of them are in the log before the position that is noted then.
    2. The outbox table: its oldest event.
    3. The log, until the slot has confirmed that position. Then everything read from it again is younger than the first
       look. If the slot has confirmed less, the log may hold anything, even after the rows were pruned.
    4. Each topic that may hold events (`event_topics`), as readers of committed records see it, once the transactions
       have ended that were open there. One that stays open hides records of any age.
    5. The open dead letters of all sinks.

    Old events reach one of these places later only from an earlier one. Today and yesterday are kept in any case, so an
    id may be a day older than its row: clocks that differ, ids made by a client. Ids below the horizon are no evidence:
    they are forgotten already, and their events are set aside. Ids that are no UUIDv7 are no evidence either, because
    their events are never applied.

Rows of other tables, each deleted in small batches when it is useless
    - What strategies remember by event_id, as `merge` does in landed_events: the id is below the horizon, so nothing
      can bring the event again, and the strategy sets it aside if it comes; and the event is older than ``keep_days``,
      because people read such a table.
    - dead_letters: a person or a replay has resolved it, its event was not seen for ``keep_days``, and the event cannot
      be applied without it. A discarded dead letter is what keeps its event from being applied, and a replayed one may
      be the only memory of it. So the id must be below the horizon. If it is no UUIDv7, the record is no event and says
      nothing of its age: then all that its topic still has must have arrived after the record was last seen, or the
      next reader would set it aside once more. An id that claims a future time is kept until that time has passed. Open
      dead letters stay. So do discarded ones that hold a valid event, because `outbox check` subtracts them from what
      is due; and those of captured tables, whose horizon is unknown. There are as many of both as were resolved by
      hand.
    - What strategies remember by topic_id, partition and offset, as `offset-log` does in event_log: the topic has
      dropped the offset, or it was deleted. What a topic has dropped can come only as a new record with a new offset.
    - What strategies remember of captured tables, in processed_changes: the position in the write-ahead log is before
      the slot's restart position, so the log cannot bring the change, and before the position of every change on the
      topic. A new snapshot brings the rows with its own, later position. The slot's confirmed position would not do: a
      transaction that is confirmed later may have written before it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

import psycopg2
from confluent_kafka import Message
from psycopg2 import extensions

from outbox.base.database import connected
from outbox.base.errors import Failure
from outbox.base.settings import Role, Settings, SinkRole, SourceRole
from outbox.base.terminal import Progress
from outbox.base.wait import WaitTimeoutError, wait_for
from outbox.events import catalog
from outbox.kafka import records, topics
from outbox.kafka.records import CLOCK_MARGIN, headers_of
from outbox.relay import connectors, slot
from outbox.relay.connectors import Connector
from outbox.sink import discovery
from outbox.sink.decoding.decoder import UUID_V7
from outbox.sink.decoding.values import EPOCH, day_of
from outbox.sink.remembering import fence
from outbox.sink.remembering.strategy import Memory

T = TypeVar("T")

SUBJECT = "retention"  # of a failure

WRITERS_TIMEOUT_S = 30.0
TOPIC_TIMEOUT_S = 75.0  # for transactions: Connect's time out after a minute, and a broker ends them within 10 s
# Without exactly-once Connect stores its offsets, and the slot is confirmed, once a minute (offset.flush.interval.ms).
CONFIRM_TIMEOUT_S = 90.0
NUDGE_EVERY_S = 0.5
KEEP_DAYS = 90
DELETE_ROWS = 1_000  # in one transaction, for which a sink may have to wait
# Longer than the server's deadlock_timeout of 1 s, after which an autovacuum gives way.
LOCK_TIMEOUT_S = 2
TURN_TIMEOUT_S = 60.0

# A transaction that has written an event holds this lock until it ends, and every role may see it.
WRITERS = """
SELECT virtualtransaction FROM pg_locks
 WHERE locktype = 'relation' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
   AND relation = 'public.outbox'::regclass AND mode = 'RowExclusiveLock' AND granted
"""
OUTBOX = "SELECT id FROM public.outbox WHERE uuid_extract_version(id) = 7 AND id >= %s ORDER BY id LIMIT 1"
OPEN_LETTERS = """
SELECT event_id FROM public.dead_letters
 WHERE status = 'open' AND uuid_extract_version(event_id) = 7 AND event_id >= %s ORDER BY event_id LIMIT 1
"""
READ_TOPICS = "SELECT DISTINCT topic FROM public.positions"
HORIZON = "SELECT horizon, (now() AT TIME ZONE 'UTC')::date - 1 FROM public.dedup_horizon"

IDS = "event_id < least(%(horizon)s::uuid, public.first_uuid_of((now() AT TIME ZONE 'UTC')::date - %(days)s))"
RESOLVED = "status <> 'open' AND NOT (status = 'discarded' AND is_event)"
USELESS_LETTERS = f"""
    topic = ANY (%(topics)s) AND {RESOLVED} AND last_seen_at < now() - make_interval(days => %(days)s)
    AND CASE WHEN uuid_extract_version(event_id) = 7 THEN event_id < %(horizon)s::uuid
             ELSE last_seen_at < (%(oldest)s::jsonb ->> topic)::timestamptz END
"""
WITHOUT_AGE = f"""
SELECT DISTINCT topic FROM public.dead_letters
 WHERE topic = ANY (%(topics)s) AND {RESOLVED} AND last_seen_at < now() - make_interval(days => %(days)s)
   AND uuid_extract_version(event_id) IS DISTINCT FROM 7
"""  # noqa: S608
CHANGES = "lsn < %(lsn)s"
DROPPED = 'topic_id = %(topic_id)s AND partition = %(partition)s AND "offset" < %(first)s'
DELETED = "topic_id <> ALL (%(topic_ids)s)"

SINKS = "SELECT name FROM public.sinks ORDER BY name"
LOGGING = """
SELECT one.name FROM public.sinks AS one
 WHERE EXISTS (SELECT FROM public.{table} AS logged WHERE logged.sink = one.name) ORDER BY one.name
"""
READ = "SELECT DISTINCT topic, topic_id FROM public.positions WHERE sink = %s"
CAPTURING = """
SELECT sink, lsn
  FROM (SELECT DISTINCT sink FROM public.positions WHERE topic = %s) AS reader
       CROSS JOIN LATERAL (SELECT lsn FROM public.{table} WHERE sink = reader.sink ORDER BY lsn LIMIT 1) AS first
 ORDER BY sink
"""
# The first day to which the horizon must be raised for anything to be forgotten: the end of a partition, or the day
# after that of an id. Null if there is nothing.
DUE = f"""
SELECT least(
    (SELECT min(upper(days)) FROM public.processed_partitions WHERE bound > horizon),
    {{of_ids}}
    (SELECT min(public.day_of(event_id)) + 1
       FROM public.dead_letters
      WHERE {RESOLVED} AND topic = ANY (%(topics)s)
        AND uuid_extract_version(event_id) = 7 AND event_id >= horizon
        AND last_seen_at < now() - make_interval(days => %(keep_days)s))
)
  FROM public.dedup_horizon, CAST(now() AT TIME ZONE 'UTC' AS date) AS today
"""  # noqa: S608
DUE_OF_IDS = """
    (SELECT min(public.day_of(kept.event_id)) + 1
       FROM public.sinks
            CROSS JOIN LATERAL (SELECT event_id FROM public.{table}
                                 WHERE sink = name AND event_id >= horizon ORDER BY event_id LIMIT 1) AS kept
      WHERE kept.event_id < public.first_uuid_of(today - %(keep_days)s)),
"""
BELOW = """
SELECT name, estimated_rows, pg_total_relation_size(name)
  FROM public.processed_partitions WHERE bound <= public.first_uuid_of(%s) ORDER BY bound
"""
DROP = "SELECT name, estimated_rows, bytes FROM public.drop_processed_events(%s)"

Parameters = Sequence[object] | Mapping[str, object] | None
Nudge = Callable[[], object]
Oldest = Callable[[Settings, str], datetime | None]


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


class Partition(NamedTuple):
    """A partition of processed_events."""

    name: str
    estimated_rows: int | None
    bytes: int

    def __str__(self) -> str:
        rows = "" if self.estimated_rows is None else f"about {self.estimated_rows:,} rows, "
        return f"{self.name}: {rows}{self.bytes / 2**20:,.1f} MiB"


@dataclass(frozen=True)
class RetentionResult:
    """Deleted ids, and why no more could be deleted. In a dry run, what would be forgotten.

    Ids from ``horizon`` on are kept. If there was nothing to forget, no evidence was looked for.
    """

    horizon: date
    evidence: tuple[Evidence, ...] = ()
    dropped: tuple[Partition, ...] = ()
    deleted: dict[str, int] = field(default_factory=dict)  # rows, by table

    def as_dict(self) -> dict[str, Any]:
        return {
            "horizon": str(self.horizon),
            "evidence": [str(found) for found in self.evidence],
            "dropped": [partition.name for partition in self.dropped],
            "deleted": self.deleted,
        }


def expire(
    settings: Settings,
    *,
    keep_days: int = KEEP_DAYS,
    dry_run: bool = False,
    report: Progress = lambda _: None,
    nudge: Nudge = lambda: None,
) -> RetentionResult:
    """Forget what nothing can bring again, beside running writers, relay and sinks. What people read stays for
    ``keep_days`` at least.

    It asks first what could be forgotten. If that is nothing, it neither waits nor reads topics. ``report`` receives a
    line for each piece of evidence, partition and table. ``nudge`` commits something that the relay reads: see
    `gather`.

    Raises Failure if a place cannot be read, if there is no slot or it was invalidated, or if the sinks leave no gap
    between their transactions. What is forgotten by then stays forgotten; run it again for the rest.
    """
    horizon, yesterday = deduplication_horizon(settings)
    day, due = day_of(horizon), _due(settings, keep_days)
    found: tuple[Evidence, ...] = ()
    if due is not None and due <= yesterday:
        for each in gather(settings, due, nudge):
            report(str(each))
            found += (each,)
        allowed = min(each.day for each in found)
        day = max(day, allowed) if allowed >= due else day
    partitions = below(settings, day)
    if not dry_run and (partitions or day > day_of(horizon)):
        partitions = drop(settings, day)
    for partition in partitions:
        report(f"{'would drop' if dry_run else 'dropped'} {partition}")
    deleted = delete_rows(settings, max(horizon, first_uuid(day)), keep_days=keep_days, dry_run=dry_run)
    for table, rows in deleted.items():
        report(f"{'would delete' if dry_run else 'deleted'} {rows:,} rows of {table}")
    return RetentionResult(day, found, partitions, deleted)


def below(settings: Settings, day: date) -> tuple[Partition, ...]:
    """The partitions that end at or before this day."""
    with connected(settings, SinkRole.PRUNER, SUBJECT) as connection, connection.cursor() as cursor:
        return _partitions(cursor, BELOW, day)


def drop(settings: Settings, day: date) -> tuple[Partition, ...]:
    """Raise the horizon to a day, and drop the partitions that end at or before it.

    Each transaction drops a bounded number and holds the lock of every sink: no batch sees two horizons, and none waits
    behind a drop that waits for readers. A sink that is created meanwhile waits too. Raises Failure if the sinks leave
    no gap; the next run drops the partitions that are left below the horizon.
    """
    dropped: tuple[Partition, ...] = ()
    with connected(settings, SinkRole.PRUNER, SUBJECT) as connection:
        while some := between_batches(connection, fence.all_sinks, lambda cursor: _partitions(cursor, DROP, day)):
            dropped += some
    return dropped


def _due(settings: Settings, keep_days: int) -> date | None:
    parameters = {"topics": event_topics(settings), "keep_days": keep_days}
    tables = [one.table for one in discovery.memories(settings) if one.is_of_ids and not one.is_partitioned]
    of_ids = "".join(DUE_OF_IDS.format(table=table) for table in tables)
    due: date | None = _ask(settings, SinkRole.PRUNER, DUE.format(of_ids=of_ids), parameters)[0][0]
    return due


def _partitions(cursor: extensions.cursor, query: str, day: date) -> tuple[Partition, ...]:
    cursor.execute(query, [day])
    return tuple(map(Partition._make, cursor))


# Evidence ----------------------------------------------------------------------------------------------------------


def deduplication_horizon(settings: Settings) -> tuple[UUID, date]:
    """The deduplication horizon, and yesterday (UTC) by the clock of the sink database."""
    ((horizon, yesterday),) = _ask(settings, SinkRole.AUDITOR, HORIZON)
    return UUID(horizon), yesterday


def gather(settings: Settings, wanted: date, nudge: Nudge = lambda: None) -> Iterator[Evidence]:
    """The evidence of each place, in the order in which events move. It ends with the first place that holds an event
    of a day before ``wanted``.

    ``nudge`` commits something that the relay reads, because a slot is confirmed by what comes through it: Debezium
    confirms a transaction when it has seen the next. It is called again and again until the slot has confirmed enough.

    Raises Failure if a place cannot be read, or if the slot does not exist or was invalidated.
    """
    floor, yesterday = deduplication_horizon(settings)
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
        former |= {topic for (topic,) in _ask(settings, SinkRole.PRUNER, READ_TOPICS)}
    captured = {topic for connector in connectors.others(settings) for topic in connector.topics}  # hold no events
    return [*declared, *sorted(former - captured - {*declared})]


def first_uuid(day: date) -> UUID:
    """The lowest UUID with a time on this day (UTC)."""
    return UUID(int=((day - EPOCH) // timedelta(milliseconds=1)) << 80)


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
    with connected(settings, SourceRole.AUDITOR, SUBJECT) as connection:
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


def _dead_letters(settings: Settings, floor: UUID) -> Evidence:
    return Evidence("open dead letters", _oldest(settings, SinkRole.AUDITOR, OPEN_LETTERS, floor))


def _oldest(settings: Settings, role: Role, query: str, floor: UUID) -> UUID | None:
    return next((UUID(oldest) for (oldest,) in _ask(settings, role, query, [str(floor)])), None)


def _log(settings: Settings, floor: UUID, position: int, nudge: Nudge) -> Evidence:
    place = "write-ahead log"

    def is_confirmed() -> bool:
        found = slot.read(settings)
        if found is None or found.wal_status == "lost":
            what, code = (
                ("does not exist", "slot-missing") if found is None else ("was invalidated", "slot-invalidated")
            )
            remedy = "`outbox connect apply`" if found is None else connectors.load(settings).start_again
            message = f"slot {settings.connector} {what}, so what the relay will send is unknown"
            raise Failure(message, remedy, code=code)
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
    for message in _from_firsts(settings, topic, within):
        event_id = deduplication_id(message)
        if event_id is None or event_id < lowest or (oldest is not None and event_id >= oldest):
            continue
        oldest = event_id
        if oldest < bound:
            break
    return Evidence(f"topic {topic}", None if oldest is None else UUID(oldest))


def _from_firsts(settings: Settings, topic: str, within: records.Within) -> Iterator[Message]:
    """The records of a topic, the first of each partition before all: mostly they hold everything."""
    firsts = {partition: (first, min(first + 1, end)) for partition, (first, end) in within.items()}
    yield from records.read(settings, topic, firsts)
    yield from records.read(settings, topic, within)


def deduplication_id(message: Message) -> str | None:
    """The id by which a sink would apply the record."""
    text = (dict(headers_of(message)).get("id") or b"").decode(errors="replace")
    return text if UUID_V7.fullmatch(text) else None


# Rows of other tables ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """Which rows of one sink are useless."""

    table: str
    key: Sequence[str]  # of the rows of a sink
    sink: str
    condition: str
    parameters: Mapping[str, object]

    def count(self, connection: extensions.connection) -> int:
        """How many there are."""
        ((rows,),) = _rows(connection, f"SELECT count(*) {self._rows}", self._arguments)
        return int(rows)

    def delete(self, connection: extensions.connection) -> int:
        """Delete them, some in each transaction. Returns how many there were."""
        key = ", ".join(f'"{column}"' for column in self.key)
        delete = f"""
            DELETE FROM public.{self.table} AS kept
             USING (SELECT {key} {self._rows} LIMIT {DELETE_ROWS}) AS useless
             WHERE kept.sink = %(sink)s AND {" AND ".join(f'kept."{one}" = useless."{one}"' for one in self.key)}
        """  # noqa: S608

        def delete_some(cursor: extensions.cursor) -> int:
            cursor.execute(delete, self._arguments)
            return cursor.rowcount

        deleted = 0
        while _rows(connection, f"SELECT 1 {self._rows} LIMIT 1", self._arguments):  # before a turn is waited for
            deleted += between_batches(connection, lambda _: [self.sink], delete_some)
        return deleted

    @property
    def _rows(self) -> str:
        return f"FROM public.{self.table} WHERE sink = %(sink)s AND {self.condition}"

    @property
    def _arguments(self) -> dict[str, object]:
        return {**self.parameters, "sink": self.sink}


def delete_rows(
    settings: Settings,
    horizon: UUID,
    *,
    keep_days: int = KEEP_DAYS,
    dry_run: bool = False,
    oldest: Oldest = records.oldest,
) -> dict[str, int]:
    """Delete rows that are useless at this horizon, in small transactions beside running sinks, and return how many of
    each table. A dry run only counts them. ``oldest`` says when the oldest record of a topic has arrived.

    Raises Failure if a sink leaves no gap between its transactions, or if Kafka or a database cannot be asked. What is
    deleted by then stays deleted; run it again for the rest.
    """
    deleted: Counter[str] = Counter()
    with connected(settings, SinkRole.PRUNER, SUBJECT) as connection:
        for rule in _rules(settings, connection, horizon, keep_days, oldest):
            deleted[rule.table] += rule.count(connection) if dry_run else rule.delete(connection)
    return {table: rows for table, rows in deleted.items() if rows}


def between_batches(
    connection: extensions.connection, sinks: Callable[[extensions.cursor], Collection[str]], action: Callable[..., T]
) -> T:
    """Call ``action(cursor)`` in one transaction that holds the apply lock of every sink that ``sinks(cursor)`` names.

    So it meets no sink in the middle of a batch, and cannot deadlock with one. Nor does a sink wait for long: the
    transaction gives up after `LOCK_TIMEOUT_S` without a lock, and is tried again. Raises Failure, with nothing
    changed, if it got no turn within `TURN_TIMEOUT_S`.
    """
    holder = "a sink is starting"

    def attempt() -> list[T]:
        nonlocal holder
        try:
            with connection, connection.cursor() as cursor:
                cursor.execute("SELECT set_config('lock_timeout', %s, true)", [f"{LOCK_TIMEOUT_S}s"])
                for sink in sorted(sinks(cursor)):
                    holder = f"sink {sink} is in a transaction"
                    fence.lock(cursor, sink)
                holder = "another session uses the tables"
                return [action(cursor)]
        except psycopg2.errors.LockNotAvailable:
            return []

    try:
        (result,) = wait_for("the sinks to be between two batches", attempt, timeout_s=TURN_TIMEOUT_S, poll_s=0.2)
    except WaitTimeoutError:
        raise Failure(
            f"{holder}, and does not end", "end that session, and run the command again", code="sinks-busy"
        ) from None
    return result


def _rules(
    settings: Settings, connection: extensions.connection, horizon: UUID, keep_days: int, oldest: Oldest
) -> Iterator[Rule]:
    ours, memories = event_topics(settings), discovery.memories(settings)
    parameters: dict[str, object] = {"horizon": str(horizon), "days": keep_days, "topics": ours}
    names = [topic for (topic,) in _rows(connection, WITHOUT_AGE, parameters)]
    arrived = {name: oldest(settings, name) for name in names}  # what was seen before has left the topic
    before = {name: "infinity" if at is None else (at - CLOCK_MARGIN).isoformat() for name, at in arrived.items()}
    parameters["oldest"] = json.dumps(before)
    for (sink,) in _rows(connection, SINKS):
        for memory in memories:
            if memory.is_of_ids and not memory.is_partitioned:
                yield Rule(memory.table, memory.by, sink, IDS, parameters)
        yield Rule("dead_letters", ["identity"], sink, USELESS_LETTERS, parameters)
    for memory in memories:
        if memory.is_of_places:
            yield from _logged(settings, connection, memory)
        for connector in connectors.others(settings) if memory.is_of_changes else ():
            yield from _captured(settings, connection, connector, memory)


def _logged(settings: Settings, connection: extensions.connection, memory: Memory) -> Iterator[Rule]:
    names = {*event_topics(settings), *(connector.topic for connector in connectors.others(settings))}
    for (sink,) in _rows(connection, LOGGING.format(table=memory.table)):
        read = _rows(connection, READ, [sink])
        if not read:
            continue  # it may still have to read its topics again
        current = topics.existing(settings, {*names, *(topic for topic, _ in read)})
        for topic, topic_id in read:
            if topic not in current or current[topic].id != topic_id:
                continue  # its rows stay until the sink has accepted that the topic was deleted, or created anew
            for partition, first in topics.first_offsets(settings, topic).items():
                place: dict[str, object] = {"topic_id": topic_id, "partition": partition, "first": first}
                yield Rule(memory.table, memory.by, sink, DROPPED, place)
        # An existing topic without a position is no deleted one: the sink may have to read it again.
        ids = {topic_id for _, topic_id in read} | {topic.id for topic in current.values()}
        yield Rule(memory.table, memory.by, sink, DELETED, {"topic_ids": sorted(ids)})


def _captured(
    settings: Settings, connection: extensions.connection, connector: Connector, memory: Memory
) -> Iterator[Rule]:
    lowest = dict(_rows(connection, CAPTURING.format(table=memory.table), [connector.topic]))
    bound = _useless_below(settings, connector, min(lowest.values())) if lowest else None
    for sink in lowest if bound is not None else ():
        yield Rule(memory.table, memory.by, sink, CHANGES, {"lsn": bound})


def _useless_below(settings: Settings, connector: Connector, lowest: int) -> int | None:
    """The position in the log below which nothing can bring a change again; None if that is not above ``lowest``."""
    found = slot.read(settings, connector)  # first: a change leaves the log for the topic
    if found is None or found.restart_lsn <= lowest or not topics.exists(settings, connector.topic):
        return None
    ends = topics.watermarks(settings, connector.topic)
    if {partition: end for partition, (_, end) in ends.items()} != topics.high_watermarks(settings, connector.topic):
        return None  # an open transaction hides records
    bound = found.restart_lsn
    for message in _from_firsts(settings, connector.topic, ends):
        bound = min(bound, _lsn(message, bound))
        if bound <= lowest:
            return None
    return bound


def _lsn(message: Message, otherwise: int) -> int:
    """The position in the log of a change. A record without one is no change, and is never applied."""
    try:
        return int(json.loads(message.value() or b"")["source"]["lsn"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return otherwise


def _ask(settings: Settings, role: Role, query: str, parameters: Parameters = None) -> list[tuple[Any, ...]]:
    with connected(settings, role, SUBJECT) as connection:
        return _rows(connection, query, parameters)


def _rows(connection: extensions.connection, query: str, parameters: Parameters = None) -> list[tuple[Any, ...]]:
    with connection, connection.cursor() as cursor:
        cursor.execute(query, parameters)
        return cursor.fetchall()
