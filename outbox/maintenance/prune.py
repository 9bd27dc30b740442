"""Remove from the outbox what is surely relayed, and move the slot of an outbox in which nothing happens.

What proves that events were relayed is a marker that goes their way. A snapshot of the outbox is taken, and then a
position L of the log is read: every event that the snapshot shows was committed before L. Then the marker is committed,
behind L, and goes through the slot and Debezium to a topic of its own. Once the offset that Connect has *stored* is L
or more, every transaction that was committed before L has been sent and acknowledged: Debezium sends in the order of
commits, and Connect stores no offset before all records ahead of it are acknowledged. An offset of a snapshot says
nothing of the kind, as all its rows share one position.

The slot's own position proves nothing: without exactly-once Debezium confirms what Kafka acknowledged before Connect
has stored it, and anybody may advance a slot. It is waited for too, as it is what lets go of the log.

And an offset cannot tell what the slot never gave. So each event is also looked for on the topic before it is deleted.
One that the marker has overtaken and that is not there is *lost*; its row is the last copy, and stays. One so old that
the topic may have dropped it cannot be looked up, and stays unless the marker alone is trusted.

Deleted is in small transactions, each of events that were found. Cut off anywhere, it can be run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

from psycopg2 import extensions

from outbox.base.database import connect, told
from outbox.base.errors import Failure
from outbox.base.settings import Settings, SourceRole
from outbox.base.wait import WaitTimeoutError, wait_for
from outbox.kafka import topics
from outbox.relay import connectors, slot
from outbox.relay.arrivals import id_of
from outbox.relay.connect import Rest

# Without exactly-once Connect stores offsets once a minute (offset.flush.interval.ms), and two may be waited for.
PASS_TIMEOUT_S = 150.0
LOOK_UP_EVENTS = 250_000  # at once; what bounds the memory
DELETE_EVENTS = 1_000  # in one transaction
CLOCK_MARGIN = timedelta(minutes=10)  # that the clocks of ledger and brokers may differ
ROUTE = "transforms.outbox.route.topic.regex"
AGAIN = "run it again"

OLD = "occurred_at <= (now() AT TIME ZONE 'utc') - make_interval(hours => %s)"

# Deleted in the transaction that inserts it: the log has it, and nobody who reads the table sees a marker among events.
MARK = """
INSERT INTO outbox (aggregatetype, aggregateid, type, payload)
VALUES (%s, 'outbox prune', 'outbox.marker', '{}') RETURNING id
"""


@dataclass(frozen=True)
class Evidence:
    """Who has passed the marker. Positions in the log are bytes since its beginning."""

    marker_lsn: int  # every event that may be deleted was committed before it
    offset_lsn: int  # that Connect has stored
    slot_lsn: int  # that the slot has confirmed


@dataclass
class Kept:
    """Events that were old enough and stay."""

    count: int = 0
    first: str | None = None  # id

    def add(self, event_id: str) -> None:
        self.count += 1
        self.first = self.first or event_id


@dataclass
class Pruned:
    """What was done to the outbox, and why that was safe."""

    evidence: Evidence
    found: int  # old events that are on the topic
    deleted: int
    lost: Kept  # relayed past, and not on the topic
    too_old: Kept  # to be looked up: the topic may have dropped them

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def count_old(settings: Settings, keep_hours: int) -> int:
    """How many events are older than that."""
    with _ledger(settings) as connection, connection.cursor() as cursor:
        cursor.execute(f"SELECT count(*) FROM outbox WHERE {OLD}", [keep_hours])  # noqa: S608
        ((count,),) = cursor.fetchall()
    return int(count)


def mark(settings: Settings) -> None:
    """Send markers through the relay: a commit that moves the slot, and no event to anybody."""
    with _ledger(settings) as connection:
        _mark(settings, connection)


def prune(
    settings: Settings,
    *,
    keep_hours: int,
    trust_marker: bool = False,
    timeout_s: float = PASS_TIMEOUT_S,
    report: Callable[[str], None] = lambda _: None,
) -> Pruned:
    """Delete the relayed events that are older than ``keep_hours``, beside whoever writes.

    ``trust_marker`` deletes also what is too old to be looked up; what is lost is never deleted. ``report`` is given a
    line for each step that may take long.
    Raises Failure, with nothing deleted, if the connector does not pass the marker in time, if it or its slot cannot be
    trusted, or if another prune is at work.
    """
    rest = Rest(settings)
    _require_route(settings, rest)
    slot.require_continuity(settings, rest.offset_lsn)
    with _ledger(settings) as snapshot, _ledger(settings) as connection:
        snapshot.set_session(isolation_level="REPEATABLE READ", readonly=True)
        marker_lsn = _begin(snapshot)
        _mark(settings, connection)
        report(f"marker sent; the relay is given {timeout_s:.0f} s to pass it")
        evidence = _wait_passed(settings, rest, marker_lsn, timeout_s)
        end = _wait_decided(settings, timeout_s)
        done = Pruned(evidence, 0, 0, Kept(), Kept())
        for events in _old_events(snapshot, keep_hours):
            report(f"looking {len(events)} events up on {settings.topic}; {done.deleted} are deleted so far")
            missing = _missing(settings, events, end)
            done.found += len(events) - len(missing)
            staying = _sort_out(settings, missing, done, trust_marker=trust_marker) if missing else set()
            done.deleted += _delete(connection, [event_id for event_id in events if event_id not in staying])
    return done


def _require_route(settings: Settings, rest: Rest) -> None:
    """A marker for which there is no route or no topic would be an event to every sink, or stop the relay."""
    config = rest.config()
    if config is None or config.get(ROUTE) != connectors.load(settings).config[ROUTE]:
        raise Failure(
            f"connector {settings.connector} {'is not there' if config is None else 'has no route for markers'}",
            "`outbox connect apply`",
        )
    topics.describe(settings, topics.markers_topic(settings))


def _begin(snapshot: extensions.connection) -> int:
    """Take the snapshot, and return a position of the log behind everything that it shows."""
    with snapshot.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_xact_lock(hashtext('outbox prune'))")  # the snapshot is this statement's
        ((alone,),) = cursor.fetchall()
        if not alone:
            raise Failure("another `outbox prune` is at work", "let it finish")
        cursor.execute("SELECT pg_current_wal_insert_lsn() - '0/0'")
        ((marker_lsn,),) = cursor.fetchall()
    return int(marker_lsn)


def _mark(settings: Settings, connection: extensions.connection) -> None:
    """Two markers: with an event Debezium confirms to the slot the commit before it, which is to be the first one's."""
    for _ in range(2):
        with connection, connection.cursor() as cursor:
            cursor.execute(MARK, [topics.markers_topic(settings)])
            cursor.execute("DELETE FROM outbox WHERE id = %s", cursor.fetchone())


def _wait_passed(settings: Settings, rest: Rest, marker_lsn: int, timeout_s: float) -> Evidence:
    def passed() -> Evidence | None:
        stored, found = rest.streamed_lsn(), slot.read(settings)
        if stored is None or found is None or min(stored, found.confirmed_lsn) < marker_lsn:
            return None
        return Evidence(marker_lsn, stored, found.confirmed_lsn)

    try:
        return wait_for("the marker", passed, timeout_s=timeout_s, poll_s=0.2)
    except WaitTimeoutError as error:
        stored = rest.offset_lsn()
        raise Failure(
            f"connector {settings.connector} has not passed the marker at {slot.lsn(marker_lsn)} in {timeout_s:.0f} s;"
            f" its stored offset is {'none' if stored is None else slot.lsn(stored)}; nothing was deleted",
            "`outbox doctor`, then again",
        ) from error


def _wait_decided(settings: Settings, timeout_s: float) -> dict[int, int]:
    """By partition, an offset up to which no transaction is open, behind everything that was relayed by now.

    The offset that Connect stored is committed together with the records, but a reader may see it a little before them.
    """
    written = topics.high_watermarks(settings, settings.topic)

    def decided() -> dict[int, int] | None:
        stable = topics.last_stable_offsets(settings, settings.topic)
        return stable if all(stable[partition] >= end for partition, end in written.items()) else None

    return wait_for("the transactions on the topic to end", decided, timeout_s=timeout_s, poll_s=0.2)


def _old_events(snapshot: extensions.connection, keep_hours: int) -> Iterator[dict[str, datetime]]:
    """Id and time of the events that the snapshot shows and that are old enough, in the order of their ids."""
    with snapshot.cursor(name="old_events") as cursor:
        cursor.execute(
            f"SELECT id, occurred_at AT TIME ZONE 'utc' FROM outbox WHERE {OLD} ORDER BY id",  # noqa: S608
            [keep_hours],
        )
        while rows := cursor.fetchmany(LOOK_UP_EVENTS):
            yield dict(rows)


def _missing(settings: Settings, events: Mapping[str, datetime], end: Mapping[int, int]) -> dict[str, datetime]:
    """Those of the events that are not on the topic, read from where the oldest may have arrived.

    The topic's timestamps are those of arrival, so that none can stand before.
    """
    missing = dict(events)
    begin = topics.offsets_since(settings, settings.topic, min(events.values()) - CLOCK_MARGIN)
    within = {partition: (begin[partition], end[partition]) for partition in begin.keys() & end.keys()}
    for message in topics.read(settings, settings.topic, within):
        try:
            missing.pop(str(id_of(message)), None)
        except (KeyError, AttributeError, ValueError):
            continue  # no event
        if not missing:
            break
    return missing


def _sort_out(settings: Settings, missing: Mapping[str, datetime], done: Pruned, *, trust_marker: bool) -> set[str]:
    """Tell the lost from those that the topic may have dropped, and return the events that stay."""
    # Asked after the topic was read, as it drops records meanwhile.
    dropped_until = topics.dropped_until(settings)
    staying = set()
    for event_id, occurred_at in missing.items():
        is_lost = dropped_until is None or occurred_at - CLOCK_MARGIN > dropped_until
        if is_lost or not trust_marker:
            (done.lost if is_lost else done.too_old).add(event_id)
            staying.add(event_id)
    return staying


def _delete(connection: extensions.connection, ids: Sequence[str]) -> int:
    deleted = 0
    for start in range(0, len(ids), DELETE_EVENTS):
        with connection, connection.cursor() as cursor:
            cursor.execute("DELETE FROM outbox WHERE id = ANY(%s::uuid[])", [ids[start : start + DELETE_EVENTS]])
            deleted += cursor.rowcount
    return deleted


@contextmanager
def _ledger(settings: Settings) -> Iterator[extensions.connection]:
    with closing(connect(settings, SourceRole.PRUNER)) as connection, told(connection, "prune", "refused", AGAIN):
        yield connection
