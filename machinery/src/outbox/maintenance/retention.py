"""Retention in the sink database: forget what nothing can bring again.

Sinks recognise a duplicate by what they have kept of its event. So an id is forgotten only with evidence that no place
can bring its event again (`outbox.maintenance.evidence`). The *deduplication horizon* is the end of what is forgotten:
it is raised in the transaction that begins to forget, and events below it are set aside. So an event that comes against
the evidence is not applied twice; it becomes a dead letter.

Ids are forgotten by days: whole partitions of processed_events are dropped. Rows of other tables that the horizon, the
topic or the log make useless are deleted in small batches (`outbox.maintenance.expiry`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date
from typing import Any, NamedTuple

from psycopg2 import extensions

from outbox.base.settings import Settings, SinkRole
from outbox.base.terminal import Progress
from outbox.maintenance import evidence, expiry
from outbox.maintenance.evidence import Evidence, Nudge, connected, first_uuid
from outbox.maintenance.expiry import KEEP_DAYS, between_batches
from outbox.sink import discovery
from outbox.sink.decoding.ids import day_of
from outbox.sink.remembering import fence

# The first day to which the horizon must be raised for anything to be forgotten: the end of a partition, or the day
# after that of an id. Null if there is nothing.
DUE = f"""
SELECT least(
    (SELECT min(upper(days)) FROM public.processed_partitions WHERE bound > horizon),
    {{of_ids}}
    (SELECT min(public.day_of(event_id)) + 1
       FROM public.dead_letters
      WHERE {expiry.RESOLVED} AND topic = ANY (%(topics)s)
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
SELECT name, days, estimated_rows, pg_total_relation_size(name)
  FROM public.processed_partitions WHERE bound <= public.first_uuid_of(%s) ORDER BY bound
"""
DROP = "SELECT name, days, estimated_rows, bytes FROM public.drop_processed_events(%s)"


class Partition(NamedTuple):
    """A partition of processed_events. ``days`` are the days (UTC) of its ids, as Postgres writes a range."""

    name: str
    days: str
    estimated_rows: int | None
    bytes: int

    def __str__(self) -> str:
        rows = "" if self.estimated_rows is None else f"about {self.estimated_rows:,} rows, "
        return f"{self.name}: {rows}{self.bytes / 2**20:,.1f} MiB"


@dataclass(frozen=True)
class RetentionResult:
    """Deleted ids, and why no more could be deleted. In a dry run, what would be forgotten.

    ``due`` is the first day to which the horizon had to be raised for anything to be forgotten; None if there was
    nothing to forget, and then no evidence was looked for. Ids from ``horizon`` on are kept.
    """

    horizon: date
    due: date | None = None
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

    It asks first what could be forgotten. If that is nothing, or if a glance shows an event that holds all of it, it
    neither waits nor reads topics. ``report`` receives a line for each piece of evidence, partition and table.
    ``nudge`` commits something that the relay reads (see `outbox.maintenance.evidence.gather`).

    Raises Failure if a place cannot be read, if there is no slot or it was invalidated, or if the sinks leave no gap
    between their transactions. What is forgotten by then stays forgotten; run it again for the rest.
    """
    horizon, yesterday = evidence.horizon(settings)
    day, due = day_of(horizon), _due(settings, keep_days)
    found: tuple[Evidence, ...] = ()
    if due is not None and due <= yesterday:
        for each in evidence.gather(settings, due, nudge):
            report(str(each))
            found += (each,)
        allowed = min(each.day for each in found)
        day = max(day, allowed) if allowed >= due else day
    else:
        due = None
    partitions = below(settings, day)
    if not dry_run and (partitions or day > day_of(horizon)):
        partitions = drop(settings, day)
    for partition in partitions:
        report(f"{'would drop' if dry_run else 'dropped'} {partition}")
    deleted = expiry.expire(settings, max(horizon, first_uuid(day)), keep_days=keep_days, dry_run=dry_run)
    for table, rows in deleted.items():
        report(f"{'would delete' if dry_run else 'deleted'} {rows:,} rows of {table}")
    return RetentionResult(day, due, found, partitions, deleted)


def below(settings: Settings, day: date) -> tuple[Partition, ...]:
    """The partitions that end at or before this day."""
    with connected(settings, SinkRole.PRUNER) as connection, connection.cursor() as cursor:
        return _partitions(cursor, BELOW, day)


def drop(settings: Settings, day: date) -> tuple[Partition, ...]:
    """Raise the horizon to a day, and drop the partitions that end at or before it.

    Each transaction drops a bounded number and holds the lock of every sink: no batch sees two horizons, and none waits
    behind a drop that waits for readers. A sink that is created meanwhile waits too. Raises Failure if the sinks leave
    no gap; the next run drops the partitions that are left below the horizon.
    """
    dropped: tuple[Partition, ...] = ()
    with connected(settings, SinkRole.PRUNER) as connection:
        while some := between_batches(connection, fence.all_sinks, lambda cursor: _partitions(cursor, DROP, day)):
            dropped += some
    return dropped


def _due(settings: Settings, keep_days: int) -> date | None:
    parameters = {"topics": evidence.event_topics(settings), "keep_days": keep_days}
    tables = [one.table for one in discovery.memories(settings) if one.is_of_ids and not one.is_partitioned]
    of_ids = "".join(DUE_OF_IDS.format(table=table) for table in tables)
    with connected(settings, SinkRole.PRUNER) as connection, connection.cursor() as cursor:
        cursor.execute(DUE.format(of_ids=of_ids), parameters)
        ((found,),) = cursor.fetchall()
    due: date | None = found
    return due


def _partitions(cursor: extensions.cursor, query: str, day: date) -> tuple[Partition, ...]:
    cursor.execute(query, [day])
    return tuple(Partition(name, str(days), rows, size) for name, days, rows, size in cursor)
