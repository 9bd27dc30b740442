"""Delete relayed events from the outbox table, and move the slot of an outbox in which nothing happens.

A marker proves that events were relayed. The ids of old events are copied aside; then a position L of the write-ahead
log is read: every event that was copied was committed before L. Then the marker is committed, behind L. It goes through
the slot and Debezium to a topic of its own. Once the offset that Connect has *stored* is L or more, every transaction
committed before L has been sent and acknowledged: Debezium sends in the order of commits, and Connect stores no offset
before all records ahead of it are acknowledged. The offset of a snapshot proves nothing, because all rows of a snapshot
share one position.

The slot's own position proves nothing either. Without exactly-once Debezium confirms what Kafka acknowledged before
Connect has stored it, and other clients may advance a slot. Prune waits for it too, because it releases the log.

One marker proves this for the events of all topics, because one task relays all of them in the order of commits.

Offsets do not reveal events that the slot never delivered. So each event is also looked up before it is deleted: on the
topic to which its aggregate type is routed, and if it is not there, on every other topic that may hold it
(`outbox.maintenance.event_topics`). An event that the marker has overtaken and that no topic has is *lost*: its row is
the last copy and stays. An event that its topic may have dropped is neither: it is no younger than the first record of
a partition that has dropped some, and the topic has no earlier event of its key. It stays unless the caller trusts the
marker alone.

No snapshot stays open while prune waits or reads topics. Deletes are small transactions. An interrupted prune can be
run again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import IO, Any

from psycopg2 import extensions

from outbox.base.database import connect, database_errors
from outbox.base.errors import Failure
from outbox.base.settings import Settings, SourceRole
from outbox.base.wait import WaitTimeoutError, wait_for
from outbox.events.catalog import TOPIC
from outbox.kafka import records, topics
from outbox.maintenance import event_topics
from outbox.relay import arrivals, connectors, routing, slot
from outbox.relay.arrivals import Ends, Events, Written
from outbox.relay.rest import Rest

# Without exactly-once Connect stores offsets once a minute (offset.flush.interval.ms); prune may need two of them.
PASS_TIMEOUT_S = 150.0
DELETE_EVENTS = 1_000  # in one transaction
AGAIN = "run the command again"

OLD = "occurred_at <= (now() AT TIME ZONE 'utc') - make_interval(hours => %s)"

# Deleted in the transaction that inserts it: the log has it, and no reader of the table sees a marker among the events.
MARK = """
INSERT INTO public.outbox (aggregatetype, aggregateid, type, payload)
VALUES (%s, 'outbox prune', 'outbox.marker', '{}') RETURNING id
"""


@dataclass(frozen=True)
class Passed:
    """The positions that have passed the marker, in bytes since the log's beginning."""

    marker_lsn: int  # every event that may be deleted was committed before it
    offset_lsn: int  # that Connect has stored
    slot_lsn: int  # that the slot has confirmed


@dataclass
class Retained:
    """Old events that stay."""

    count: int = 0
    first: str | None = None  # id

    def add(self, event_id: str) -> None:
        self.count += 1
        self.first = self.first or event_id


@dataclass
class PruneResult:
    """What was done to the outbox table, and why that was safe. ``passed`` is None if no event was old enough."""

    passed: Passed | None = None
    found: int = 0  # old events that are on a topic
    deleted: int = 0
    lost: Retained = field(default_factory=Retained)  # relayed past, and on no topic
    too_old: Retained = field(default_factory=Retained)  # their topics may have dropped them

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def count_old(settings: Settings, keep_hours: int) -> int:
    """The number of events older than ``keep_hours``."""
    with _pruner(settings) as connection, connection.cursor() as cursor:
        cursor.execute(f"SELECT count(*) FROM public.outbox WHERE {OLD}", [keep_hours])  # noqa: S608
        ((count,),) = cursor.fetchall()
    return int(count)


def mark(settings: Settings) -> None:
    """Send markers through the relay: commits that move the slot and that no sink sees."""
    with _pruner(settings) as connection:
        _mark(settings, connection)


def prune(
    settings: Settings,
    *,
    keep_hours: int,
    trust_marker: bool = False,
    sinks: bool = True,
    timeout_s: float = PASS_TIMEOUT_S,
    report: Callable[[str], None] = lambda _: None,
) -> PruneResult:
    """Delete relayed events older than ``keep_hours``, beside running writers. Without such events, only send markers.

    ``trust_marker`` also deletes events that their topics may have dropped; lost events are never deleted.
    ``sinks=False`` does not ask the sink database which topics were read before. ``report`` receives a line for each
    step that may take long. It needs 70 bytes of disk (in the folder for temporary files) per old event, and memory for
    `outbox.relay.arrivals.LOOK_UP_EVENTS`.

    Raises Failure, with nothing deleted, if the connector does not pass the marker in time, if the connector or its
    slot cannot be trusted, or if another prune is running.
    """
    rest = Rest(settings)
    _require_route(settings, rest)
    slot.require_continuity(settings, rest.offset_lsn)
    result = PruneResult()
    with _pruner(settings) as connection, tempfile.TemporaryFile() as old_events:
        _require_alone(connection)
        _copy_old(connection, keep_hours, old_events)
        marker_lsn = slot.end_of_log(settings)
        _mark(settings, connection)
        if not old_events.tell():
            return result
        report(f"marker sent; waiting up to {timeout_s:.0f} s until the relay has passed it")
        result.passed = _wait_passed(settings, rest, marker_lsn, timeout_s)
        ends = _wait_decided(settings, timeout_s)
        for events in arrivals.chunks(settings, old_events):
            report(f"looking up {len(events)} events on their topics; {result.deleted} deleted so far")
            missing = arrivals.missing(settings, events, ends)
            staying = set[str]()
            if missing:
                former = topics.existing(settings, event_topics.former(settings, sinks=sinks))
                missing = arrivals.missing_elsewhere(settings, missing, [*ends, *former])
                staying = _classify(settings, connection, missing, former, result, trust_marker=trust_marker)
            result.found += len(events) - len(missing)
            result.deleted += _delete(connection, [event_id for event_id in events if event_id not in staying])
    return result


def _require_route(settings: Settings, rest: Rest) -> None:
    """A marker without a route would be an event to every sink; without a topic it would stop the relay.

    And an event is looked up where the catalog routes it. So the connector must route as the catalog says now.
    """
    config = rest.config()
    if config is None:
        raise Failure(
            f"connector {settings.connector} does not exist", "`outbox connect apply`", code="connector-missing"
        )
    if routing.transforms(config) != routing.transforms(connectors.load(settings).config):
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


def _copy_old(connection: extensions.connection, keep_hours: int, file: IO[bytes]) -> None:
    with connection, connection.cursor() as cursor:
        arrivals.copy(cursor, file, cursor.mogrify(f"WHERE {OLD}", [keep_hours]).decode())


def _mark(settings: Settings, connection: extensions.connection) -> None:
    """Send two markers: at an event Debezium confirms the commit before it, so only the second confirms the first."""
    for _ in range(2):
        with connection, connection.cursor() as cursor:
            cursor.execute(MARK, [settings.markers_topic])
            cursor.execute("DELETE FROM public.outbox WHERE id = %s", cursor.fetchone())


def _wait_passed(settings: Settings, rest: Rest, marker_lsn: int, timeout_s: float) -> Passed:
    def passed() -> Passed | None:
        stored, found = rest.streamed_lsn(), slot.read(settings)
        if stored is None or found is None or min(stored, found.confirmed_lsn) < marker_lsn:
            return None
        return Passed(marker_lsn, stored, found.confirmed_lsn)

    try:
        return wait_for("the marker", passed, timeout_s=timeout_s, poll_s=0.2)
    except WaitTimeoutError as error:
        stored = rest.offset_lsn()
        raise Failure(
            f"connector {settings.connector} has not passed the marker at {slot.lsn(marker_lsn)} in {timeout_s:.0f} s;"
            f" its stored offset is {'none' if stored is None else slot.lsn(stored)}; nothing was deleted",
            "`outbox doctor`, then prune again",
            code="marker-not-passed",
        ) from error


def _wait_decided(settings: Settings, timeout_s: float) -> Ends:
    """By topic and partition, an offset behind everything relayed so far, below which no transaction is open.

    Connect commits its stored offset together with the records, but a reader may see the offset a little earlier.
    """
    ends = {}
    for topic in event_topics.declared(settings):
        try:
            ends[topic] = topics.wait_decided(settings, topic, timeout_s)
        except WaitTimeoutError as error:
            raise Failure(
                f"a transaction on topic {topic} did not end in {timeout_s:.0f} s; nothing was deleted",
                "end it (`kafka-transactions find-hanging`), then prune again",
                code="topic-transaction-open",
            ) from error
    return ends


def _classify(
    settings: Settings,
    connection: extensions.connection,
    missing: Events,
    former: Collection[str],
    result: PruneResult,
    *,
    trust_marker: bool,
) -> set[str]:
    """Distinguish lost events from those that a topic may have dropped, and return the events that stay.

    An event may be dropped by its own topic, or by a former one: any aggregate may have been moved from there. It was
    not if its own topic still has an earlier event of its key.
    """
    # Ask after the topics were read, because they drop records meanwhile.
    own = {event.topic for event in missing.values()}
    dropped_until = _dropped_until(settings, {*own, *former})

    def is_old(event: Written) -> bool:
        moments = [dropped_until[topic] for topic in (event.topic, *former)]
        return any(moment is not None and event.occurred_at <= moment for moment in moments)

    old = {event_id: event for event_id, event in missing.items() if is_old(event)}
    dropped = old.keys() - arrivals.skipped(settings, old, _keys(connection, old))
    staying = set()
    for event_id in missing:
        is_dropped = event_id in dropped
        if not is_dropped or not trust_marker:
            (result.too_old if is_dropped else result.lost).add(event_id)
            staying.add(event_id)
    return staying


def _keys(connection: extensions.connection, ids: Iterable[str]) -> dict[str, str]:
    """The keys of events, by id."""
    with connection, connection.cursor() as cursor:
        cursor.execute("SELECT id, aggregateid FROM public.outbox WHERE id = ANY(%s::uuid[])", [list(ids)])
        return dict(cursor.fetchall())


def _dropped_until(settings: Settings, names: Collection[str]) -> dict[str, datetime | None]:
    """By topic, until when it may have dropped events; a topic that does not exist may have dropped any."""
    found = topics.existing(settings, [name for name in names if TOPIC.fullmatch(name)])
    now = datetime.now(UTC)
    return {name: records.dropped_until(settings, name) if name in found else now for name in names}


def _delete(connection: extensions.connection, ids: Sequence[str]) -> int:
    deleted = 0
    for start in range(0, len(ids), DELETE_EVENTS):
        with connection, connection.cursor() as cursor:
            cursor.execute("DELETE FROM public.outbox WHERE id = ANY(%s::uuid[])", [ids[start : start + DELETE_EVENTS]])
            deleted += cursor.rowcount
    return deleted


@contextmanager
def _pruner(settings: Settings) -> Iterator[extensions.connection]:
    with (
        closing(connect(settings, SourceRole.PRUNER)) as connection,
        database_errors(connection, "prune", "refused", AGAIN),
    ):
        yield connection
