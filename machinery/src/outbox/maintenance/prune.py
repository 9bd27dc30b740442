"""Delete relayed events from the outbox table, and move the slot of an outbox in which nothing happens.

An event is deleted once a topic has it: the topic to which its aggregate type is routed, or another one that may hold
it (`outbox.maintenance.retention.event_topics`). Consumers of committed records see it there, so its row is no longer
the last copy.

An event that is on no topic stays and is reported, whatever the reason: not relayed yet, lost, or dropped by its topic.
`outbox check` distinguishes these; `outbox connect apply` after `remove --drop-slot` resends all of them.

Markers are rows that the relay sends to a topic of their own. They prove nothing, and move an idle slot and task.
docs/architecture.md says why, and why no offset or position proves that a row may go.

No snapshot stays open while prune reads topics. Deletes are small transactions. An interrupted prune can be run again.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from psycopg2 import extensions

from outbox.base.database import connected
from outbox.base.errors import Failure
from outbox.base.settings import Settings, SourceRole
from outbox.base.terminal import Progress
from outbox.kafka import records, topics
from outbox.maintenance.retention import event_topics
from outbox.relay import arrivals, connectors
from outbox.relay.rest import Rest

DELETE_EVENTS = 1_000  # in one transaction
OLD = "occurred_at <= (now() AT TIME ZONE 'utc') - make_interval(hours => %s)"
# Deleted in the transaction that inserts it: the log has it, and no reader of the table sees a marker among the events.
MARK = """
INSERT INTO public.outbox (aggregatetype, aggregateid, type, payload)
VALUES (%s, 'outbox prune', 'outbox.marker', '{}') RETURNING id
"""


@dataclass
class PruneResult:
    """The result for events older than ``keep_hours``. Those that no topic has stay."""

    deleted: int = 0
    on_their_way: int = 0  # stay, and are too young to be missing
    missing: int = 0  # stay: not relayed, lost, or dropped by their topic
    first_missing: str | None = None  # id


def count_old(settings: Settings, keep_hours: int) -> int:
    with connected(settings, SourceRole.PRUNER, "prune") as connection, connection.cursor() as cursor:
        cursor.execute(f"SELECT count(*) FROM public.outbox WHERE {OLD}", [keep_hours])  # noqa: S608
        ((count,),) = cursor.fetchall()
    return int(count)


def mark(settings: Settings) -> None:
    """Send two markers: at an event Debezium confirms the commit before it, so only the second confirms the first.

    Raises Failure if the connector does not route markers to their topic: each would be an event to every sink, or stop
    the relay.
    """
    _require_route(settings)
    with connected(settings, SourceRole.PRUNER, "prune") as connection:
        for _ in range(2):
            with connection, connection.cursor() as cursor:
                cursor.execute(MARK, [settings.markers_topic])
                cursor.execute("DELETE FROM public.outbox WHERE id = %s", cursor.fetchone())


def prune(settings: Settings, *, keep_hours: int, sinks: bool = True, report: Progress = lambda _: None) -> PruneResult:
    """Delete events older than ``keep_hours`` that a topic has, beside running writers, and send markers.

    ``sinks=False`` does not ask the sink database which topics were read before. ``report`` receives a line before each
    look-up. Prune needs 70 bytes of disk (in the folder for temporary files) per old event, and memory for
    `outbox.relay.arrivals.LOOK_UP_EVENTS`.

    Raises Failure, with nothing deleted, if the connector is missing or routes differently, or if another prune runs.
    """
    result = PruneResult()
    overdue_s = time.time() - records.CLOCK_MARGIN.total_seconds()
    mark(settings)
    with connected(settings, SourceRole.PRUNER, "prune") as connection, tempfile.TemporaryFile() as old_events:
        _require_alone(connection)
        with connection, connection.cursor() as cursor:
            arrivals.copy(cursor, old_events, cursor.mogrify(f"WHERE {OLD}", [keep_hours]).decode())
        for events in arrivals.chunks(settings, old_events):
            report(f"looking up {len(events)} events on their topics; {result.deleted} deleted so far")
            missing = arrivals.missing(settings, events, partial(event_topics, settings, sinks=sinks))
            result.deleted += _delete(connection, [event_id for event_id in events if event_id not in missing])
            overdue = [event_id for event_id, event in missing.items() if event.at_s < overdue_s]
            result.on_their_way += len(missing) - len(overdue)
            result.missing += len(overdue)
            result.first_missing = result.first_missing or min(overdue, default=None)
    return result


def _require_route(settings: Settings) -> None:
    config = Rest(settings).config()
    if config is None:
        raise Failure(
            f"connector {settings.connector} does not exist", "`outbox connect apply`", code="connector-missing"
        )
    if connectors.transforms(config) != connectors.transforms(connectors.load(settings).config):
        raise Failure(
            f"connector {settings.connector} does not route as connect/outbox.json and the declared events say",
            "`outbox connect apply`",
            code="routes-differ",
        )
    topics.describe(settings, settings.markers_topic)


def _require_alone(connection: extensions.connection) -> None:
    """Hold a lock until the connection ends."""
    with connection, connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_lock(hashtext('outbox prune'))")
        ((is_alone,),) = cursor.fetchall()
    if not is_alone:
        raise Failure("another `outbox prune` is running", "wait until it ends", code="prune-running")


def _delete(connection: extensions.connection, ids: Sequence[str]) -> int:
    deleted = 0
    for start in range(0, len(ids), DELETE_EVENTS):
        with connection, connection.cursor() as cursor:
            cursor.execute("DELETE FROM public.outbox WHERE id = ANY(%s::uuid[])", [ids[start : start + DELETE_EVENTS]])
            deleted += cursor.rowcount
    return deleted
