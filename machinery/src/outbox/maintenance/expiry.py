"""Rows of the sinks' tables that nothing can need again.

Each table has a rule that says when a row is useless:

- What strategies remember by event_id, as `merge` does in landed_events: the id is below the deduplication horizon, so
  nothing can bring the event again, and the strategy sets it aside if it comes; and the event is older than
  ``keep_days``, because people read such a table. Of processed_events whole partitions go
  (`outbox.maintenance.retention`).
- dead_letters: a person or a replay has resolved it, its event was not seen for ``keep_days``, and the event cannot be
  applied without it. A discarded dead letter is what keeps its event from being applied, and a
  replayed one may be the only memory of it. So the id must be below the horizon. If it is no UUIDv7, the record is no
  event and says nothing of its age: then all that its topic still has must have arrived after the record was last seen,
  or the next reader would set it aside once more. An id that claims a future time is kept until that time has passed.
  Open dead letters stay. So do discarded ones that hold a valid event, because `outbox check` subtracts them from what
  is due; and those of captured tables, whose horizon is unknown. There are as many of both as were resolved by hand.
- What strategies remember by topic_id, partition and offset, as `offset-log` does in event_log: the topic has dropped
  the offset, or it was deleted. What a topic has dropped can come only as a new record with a new offset.
- What strategies remember of captured tables, in processed_changes: the position in the write-ahead log is before the
  slot's restart position, so the log cannot bring the change, and before the position of every change on the topic. A
  new snapshot brings the rows with its own, later position. The slot's confirmed position would not do: a transaction
  that is confirmed later may have written before it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

import psycopg2
from confluent_kafka import Message
from psycopg2 import extensions

from outbox.base.errors import Failure
from outbox.base.settings import Settings, SinkRole
from outbox.base.wait import WaitTimeoutError, wait_for
from outbox.kafka import records, topics
from outbox.kafka.records import CLOCK_MARGIN
from outbox.maintenance import evidence
from outbox.maintenance.evidence import connected
from outbox.relay import connectors, slot
from outbox.relay.connectors import Connector
from outbox.sink import discovery
from outbox.sink.remembering import fence
from outbox.sink.remembering.strategy import Memory

T = TypeVar("T")

KEEP_DAYS = 90
DELETE_ROWS = 1_000  # in one transaction, for which a sink may have to wait
# Longer than the server's deadlock_timeout of 1 s, after which an autovacuum gives way.
LOCK_TIMEOUT_S = 2
TURN_TIMEOUT_S = 60.0

IDS = "event_id < least(%(horizon)s::uuid, public.first_uuid_of((now() AT TIME ZONE 'UTC')::date - %(days)s))"
RESOLVED = "status <> 'open' AND NOT (status = 'discarded' AND is_event)"
DEAD_LETTERS = f"""
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


class Rule(NamedTuple):
    """Which rows of one sink are useless."""

    table: str
    key: Sequence[str]  # of the rows of a sink
    sink: str
    condition: str
    parameters: Mapping[str, object]

    @property
    def rows(self) -> str:
        return f"FROM public.{self.table} WHERE sink = %(sink)s AND {self.condition}"

    @property
    def delete(self) -> str:
        key = ", ".join(f'"{column}"' for column in self.key)
        same = " AND ".join(f'kept."{column}" = useless."{column}"' for column in self.key)
        return f"""
            DELETE FROM public.{self.table} AS kept
             USING (SELECT {key} {self.rows} LIMIT {DELETE_ROWS}) AS useless
             WHERE kept.sink = %(sink)s AND {same}
        """  # noqa: S608

    @property
    def arguments(self) -> dict[str, object]:
        return {**self.parameters, "sink": self.sink}


Oldest = Callable[[Settings, str], datetime | None]


def expire(
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
    with connected(settings, SinkRole.PRUNER) as connection:
        for rule in _rules(settings, connection, horizon, keep_days, oldest):
            deleted[rule.table] += _count(connection, rule) if dry_run else _delete(connection, rule)
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
    ours, memories = evidence.event_topics(settings), discovery.memories(settings)
    parameters: dict[str, object] = {"horizon": str(horizon), "days": keep_days, "topics": ours}
    names = [topic for (topic,) in _rows(connection, WITHOUT_AGE, parameters)]
    parameters["oldest"] = json.dumps({name: _before(oldest(settings, name)) for name in names})
    for (sink,) in _rows(connection, SINKS):
        for memory in memories:
            if memory.is_of_ids and not memory.is_partitioned:
                yield Rule(memory.table, memory.by, sink, IDS, parameters)
        yield Rule("dead_letters", ["identity"], sink, DEAD_LETTERS, parameters)
    for memory in memories:
        if memory.is_of_places:
            yield from _logged(settings, connection, memory)
        for connector in connectors.others(settings) if memory.is_of_changes else ():
            yield from _captured(settings, connection, connector, memory)


def _before(oldest: datetime | None) -> str:
    """Condition: seen before the oldest record of a topic, so that no topic has the event."""
    return "infinity" if oldest is None else (oldest - CLOCK_MARGIN).isoformat()


def _logged(settings: Settings, connection: extensions.connection, memory: Memory) -> Iterator[Rule]:
    names = {*evidence.event_topics(settings), *(connector.topic for connector in connectors.others(settings))}
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
    firsts = {partition: (first, min(first + 1, end)) for partition, (first, end) in ends.items()}
    for within in (firsts, ends):  # mostly the first records hold everything, and the rest need not be read
        bound = _lowest_on(settings, connector.topic, within, found.restart_lsn, lowest)
        if bound <= lowest:
            return None
    return bound


def _lowest_on(settings: Settings, topic: str, within: records.Within, restart: int, lowest: int) -> int:
    """The lowest position of a change on the topic, at most ``restart``; one up to ``lowest`` ends the reading."""
    bound = restart
    for message in records.read(settings, topic, within):
        bound = min(bound, _lsn(message, restart))
        if bound <= lowest:
            break
    return bound


def _lsn(message: Message, otherwise: int) -> int:
    """The position in the log of a change. A record without one is no change, and is never applied."""
    try:
        return int(json.loads(message.value() or b"")["source"]["lsn"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return otherwise


def _count(connection: extensions.connection, rule: Rule) -> int:
    ((rows,),) = _rows(connection, f"SELECT count(*) {rule.rows}", rule.arguments)
    return int(rows)


def _exist(connection: extensions.connection, rule: Rule) -> bool:
    ((exist,),) = _rows(connection, f"SELECT EXISTS (SELECT {rule.rows})", rule.arguments)
    return bool(exist)


def _delete(connection: extensions.connection, rule: Rule) -> int:
    deleted = 0

    def delete(cursor: extensions.cursor) -> int:
        cursor.execute(rule.delete, rule.arguments)
        return cursor.rowcount

    while _exist(connection, rule):  # before a turn is waited for
        deleted += between_batches(connection, lambda _: [rule.sink], delete)
    return deleted


def _rows(
    connection: extensions.connection, query: str, parameters: Sequence[object] | Mapping[str, object] | None = None
) -> list[tuple[Any, ...]]:
    with connection, connection.cursor() as cursor:
        cursor.execute(query, parameters)
        return cursor.fetchall()
