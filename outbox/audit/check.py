"""Compare ledger, topic and sinks: events, duplicates, losses, gaps, drift, what is in flight and what is parked.

Sound under live traffic by the order of its reading: each sink's balances with its positions in one snapshot, then the
topic up to its last stable offset, then the ledger in one snapshot. Whatever was applied is on the topic that was read,
and whatever is on the topic is in the ledger that was read; the difference is in flight, and is counted out exactly.

It knows nothing of the sample but the contract's views (audit_accounts, audit_events, audit_balances) and three parts
of an event: its id (header), its ``amount`` and its ``version`` (the n-th event of its key).

Sinks of states (`changes`) see no events. They are compared by what they have come to: see `compare_states`.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import psycopg2

from outbox.audit.topic_log import Event, Place, Surplus, TopicLog, read_topic
from outbox.base.database import connect
from outbox.base.errors import Failure
from outbox.base.settings import Settings, SinkRole, SourceRole
from outbox.base.wait import wait_for
from outbox.sink import job
from outbox.sink.lakehouse import table as lakehouse_table
from outbox.sink.repair import rebuild

FETCH_ROWS = 10_000


@dataclass(frozen=True)
class SinkState:
    """One sink in one snapshot of its database."""

    name: str
    positions: dict[int, int]  # by partition, the next offset to apply
    totals: dict[str, Decimal]  # by key
    versions: dict[str, int]  # by key, the highest applied
    bases: dict[str, int]  # by key, the version up to which the total was taken from the ledger
    parked: frozenset[bytes]  # event ids that wait among its dead letters
    skipped: int
    unread: str = ""  # why its totals are not known, if they are not
    takes_states: bool = False  # of an event: so the newest applied makes up for those before it

    def has_seen(self, place: Place | None) -> bool:
        """Whether the sink had dealt with this place of the topic."""
        return place is not None and place[1] < self.positions.get(place[0], 0)

    def awaits(self, event_id: bytes, place: Place) -> bool:
        """Whether this event of the topic is still to be applied: the sink has not come to it, or has set it aside."""
        return event_id in self.parked or not self.has_seen(place)


@dataclass
class SinkReport:
    """How a sink stands to the ledger. Money in minor units."""

    name: str
    drift: dict[str, int] = field(default_factory=dict)  # by key, where it is not zero
    in_flight: int = 0  # events of the ledger that it has not dealt with yet; of states, versions that it is behind
    lost: int = 0  # events of the ledger that will not come to it
    parked: int = 0  # events that it has set aside
    skipped: int = 0  # duplicates that it has skipped, ever
    unread: str = ""  # why its drift is not known, if it is not

    @property
    def drift_total(self) -> int:
        """The sum of the absolute drifts: opposite ones do not cancel."""
        return sum(abs(amount) for amount in self.drift.values())

    def set_apart(
        self,
        state: SinkState,
        event_id: bytes,
        event: Event,
        place: Place | None,
        *,
        aged_out: bool = False,
        is_lost: bool = False,
    ) -> bool:
        """Count an event as parked, lost or in flight, if the sink has not applied it; False if its totals have it."""
        if event.version <= state.bases.get(event.key, 0):
            return False
        if event_id in state.parked:
            self.parked += 1
        elif state.has_seen(place) or aged_out:
            return False
        elif is_lost:
            self.lost += 1
        else:
            self.in_flight += 1
        return not (state.takes_states and event.version <= state.versions.get(event.key, 0))


@dataclass
class Report:
    """What the comparison found."""

    totals: dict[str, int]  # by key, what the ledger says
    outbox_events: int
    records: int
    duplicates: int
    malformed: int
    gaps: int
    lost: list[str]  # event ids that the topic has jumped over
    in_flight: int  # events of the outbox that are not on the topic yet
    unknown: int  # events on the topic that the outbox does not have: pruned there, or foreign
    sinks: list[SinkReport]
    surplus: list[Surplus]

    @property
    def findings(self) -> list[str]:
        """What is wrong, a line each; duplicates are not, as a sink must live with them."""
        found = []
        if self.lost:
            found.append(
                f"{len(self.lost)} events are lost: in the outbox, jumped over on the topic ({self.lost[0]} …)"
            )
        elif self.gaps:
            found.append(f"{self.gaps} versions are missing on the topic")
        for sink in self.sinks:
            if sink.drift:
                found.append(f"sink {sink.name} drifts by {sink.drift_total} in {len(sink.drift)} accounts")
            if sink.parked:
                found.append(f"sink {sink.name} has set {sink.parked} events aside")
        return found

    @property
    def settled(self) -> bool:
        """Nothing is in flight any more."""
        return self.in_flight == 0 and all(sink.in_flight == 0 for sink in self.sinks)

    def sink(self, name: str) -> SinkReport:
        """The report of one sink. Raises Failure if it never ran."""
        for sink in self.sinks:
            if sink.name == name:
                return sink
        raise Failure(f"no sink called {name} has run yet", f"`outbox sink --strategy {name}` runs it")

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        sinks = [{**vars(sink), "drift_total": sink.drift_total} for sink in self.sinks]
        counts = {name: value for name, value in vars(self).items() if name not in ("totals", "sinks", "surplus")}
        return {
            "accounts": len(self.totals),
            **counts,
            "sinks": sinks,
            "settled": self.settled,
            "findings": self.findings,
        }


def check(settings: Settings) -> Report:
    """Compare now. Raises Failure if a database or Kafka cannot be reached."""
    sinks = read_sinks(settings)
    of_states = {name for name, declared in job.sinks(settings).items() if declared.job.carries == "states"}
    of_events = [sink for sink in sinks if sink.name not in of_states]
    log = read_topic(settings, lambda event_id, place: any(sink.awaits(event_id, place) for sink in of_events))
    report = compare(settings, of_events, log)
    report.sinks += compare_states(settings, [sink for sink in sinks if sink.name in of_states])
    return report


def check_settled(settings: Settings, timeout_s: float) -> Report:
    """Compare once nothing is in flight. Raises WaitTimeoutError if that does not come true in time."""
    latest: list[Report] = []

    def settled() -> bool:
        latest[:] = [check(settings)]
        return latest[0].settled or bool(latest[0].lost)

    wait_for("nothing to be in flight any more", settled, timeout_s=timeout_s, poll_s=0.5)
    return latest[0]


def unrelayed(settings: Settings) -> frozenset[str]:
    """The ids of the events that the outbox table holds and the topic does not: in flight, or lost."""
    with _snapshot(settings, SourceRole.AUDITOR) as connection:
        written = [event_id for (event_id,) in _rows(connection, "SELECT event_id FROM audit_events")]
    relayed = read_topic(settings).first
    return frozenset(event_id for event_id in written if uuid.UUID(event_id).bytes not in relayed)


def read_sinks(settings: Settings) -> list[SinkState]:
    """Every sink of this project, in one snapshot; one that is a table of a lakehouse in that table's own.

    Those of other topics than it knows are left out.
    """
    tables = lakehouse_table.read(settings)  # before the letters
    positions: dict[str, dict[int, int]] = defaultdict(dict)
    totals: dict[str, dict[str, Decimal]] = defaultdict(dict)
    versions: dict[str, dict[str, int]] = defaultdict(dict)
    bases: dict[str, dict[str, int]] = defaultdict(dict)
    parked: dict[str, set[bytes]] = defaultdict(set)
    others: set[str] = set()  # sinks of other topics
    declared = job.sinks(settings)
    read_by = {name: one.job.topic for name, one in declared.items()}
    takes_states = {name for name, one in declared.items() if one.strategy.takes == "states"}
    with _snapshot(settings, SinkRole.AUDITOR) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT name, duplicates FROM sinks")
        skipped = dict(cursor.fetchall())
        cursor.execute("SELECT sink, topic, partition, next_offset FROM positions")
        for sink, topic, partition, next_offset in cursor:
            if topic == read_by.get(sink, settings.topic):
                positions[sink][partition] = next_offset
            else:
                others.add(sink)
        cursor.execute("SELECT sink, key, total, version, base_version FROM audit_balances")
        for sink, key, total, version, base_version in cursor:
            totals[sink][key] = total
            versions[sink][key] = version
            bases[sink][key] = base_version
        cursor.execute("SELECT sink, event_id FROM dead_letters WHERE status = 'open' AND event_id IS NOT NULL")
        for sink, event_id in cursor:
            parked[sink].add(uuid.UUID(event_id).bytes)
        for sink, table in tables.items():
            if table is not None:
                cursor.execute(
                    "SELECT event_id FROM dead_letters"
                    " WHERE sink = %s AND status <> 'discarded' AND event_id IS NOT NULL",
                    [sink],
                )
                parked[sink] = set(table.lacks([event_id for (event_id,) in cursor]))
                totals[sink], versions[sink] = dict(table.totals), dict(table.versions)
                if table.topic == settings.topic:
                    positions[sink] = dict(table.positions)
    unread = {sink for sink, table in tables.items() if table is None}
    return [
        SinkState(
            name,
            positions[name],
            totals[name],
            versions[name],
            bases[name],
            frozenset(parked[name]),
            skipped[name],
            lakehouse_table.UNREAD if name in unread else "",
            name.removesuffix(rebuild.SUFFIX) in takes_states,
        )
        for name in sorted({*skipped} - (others - {*positions}))
    ]


def compare(settings: Settings, states: list[SinkState], log: TopicLog) -> Report:
    """Read the ledger, and compare it with a topic and sinks that were read before it.

    An event that a sink still has to apply and that was pruned from the outbox is counted as the topic has it.
    """
    reports = [SinkReport(state.name, skipped=state.skipped, unread=state.unread) for state in states]
    pending: list[dict[str, int]] = [defaultdict(int) for _ in states]  # by sink and key: not yet, or never, applied
    applied: dict[str, int] = defaultdict(int)  # by key, the highest version that any sink has
    for state in states:
        for key, version in state.versions.items():
            applied[key] = max(applied[key], version)
    pruned = dict(log.awaited)
    lost, in_flight, events = [], 0, 0
    with _snapshot(settings, SourceRole.AUDITOR) as connection:
        for event_id, key, amount, version in _rows(
            connection, "SELECT event_id, key, amount, version FROM audit_events"
        ):
            events += 1
            identity = uuid.UUID(event_id).bytes
            pruned.pop(identity, None)
            event, place = Event(key, int(amount), version), log.first.get(identity)
            known = log.versions.get(key)
            aged_out = not log.is_whole and (version < known.lowest if known else version <= applied[key])
            # The relay keeps the order of a key, so it will not come any more.
            is_lost = place is None and known is not None and known.lowest <= version < known.highest
            if is_lost:
                lost.append(event_id)
            elif place is None and not aged_out:
                in_flight += 1
            for state, report, unapplied in zip(states, reports, pending, strict=True):
                if report.set_apart(state, identity, event, place, aged_out=aged_out, is_lost=is_lost):
                    unapplied[key] += event.amount
        totals = {key: int(total) for key, total in _rows(connection, "SELECT key, total FROM audit_accounts")}
    for state, report, unapplied in zip(states, reports, pending, strict=True):
        for identity, event in pruned.items():
            if report.set_apart(state, identity, event, log.first[identity]):
                unapplied[event.key] += event.amount
        for key in () if state.unread else {*totals, *state.totals}:
            difference = int(state.totals.get(key, 0)) - (totals.get(key, 0) - unapplied[key])
            if difference:
                report.drift[key] = difference
    return Report(
        totals=totals,
        outbox_events=events,
        records=log.records,
        duplicates=len(log.surplus),
        malformed=log.malformed,
        gaps=sum(known.gaps for known in log.versions.values()),
        lost=lost,
        in_flight=in_flight,
        unknown=max(0, len(log.first) - (events - in_flight - len(lost))),
        sinks=reports,
        surplus=log.surplus,
    )


def compare_states(settings: Settings, sinks: list[SinkState]) -> list[SinkReport]:
    """Read the ledger, and compare it with sinks of states that were read before it.

    A key whose version is the ledger's must have its total. One that is behind is in flight, by as many versions, and
    its total tells nothing yet: also one whose change is lost, or set aside, until the next one makes up for it.
    A key that the ledger does not have must have nothing.
    """
    reports = [SinkReport(sink.name, parked=len(sink.parked), skipped=sink.skipped) for sink in sinks]
    if not sinks:
        return []
    with _snapshot(settings, SourceRole.AUDITOR) as connection:
        ledger = {key: rest for key, *rest in _rows(connection, "SELECT key, total, version FROM audit_accounts")}
    for sink, report in zip(sinks, reports, strict=True):
        for key in {*ledger, *sink.totals}:
            total, version = ledger.get(key, (0, 0))
            behind = version - sink.versions.get(key, -1)  # a key begins with version 0, and that is a change too
            if key in ledger and behind > 0:
                report.in_flight += behind
            elif difference := int(sink.totals[key]) - int(total):
                report.drift[key] = difference
    return reports


@contextmanager
def _snapshot(settings: Settings, role: SourceRole | SinkRole) -> Iterator[psycopg2.extensions.connection]:
    connection = connect(settings, role)
    try:
        connection.set_session(isolation_level="REPEATABLE READ", readonly=True)
        yield connection
    except psycopg2.Error as error:
        raise Failure(f"reading database {connection.info.dbname}: {str(error).strip()}", "`outbox migrate`") from error
    finally:
        connection.close()


def _rows(connection: psycopg2.extensions.connection, query: str) -> Iterator[tuple[Any, ...]]:
    """Rows of a query that may be larger than memory."""
    with connection.cursor(name="check") as cursor:
        cursor.itersize = FETCH_ROWS
        cursor.execute(query)
        yield from cursor
