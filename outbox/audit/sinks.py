"""Read how far every sink has come, and its totals, in one snapshot of the sink database.

The totals come from the view ``sink_totals`` of the domain, or from the sink's own target if that is elsewhere.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Literal

from psycopg2 import extensions, sql

from outbox.audit.source import snapshot
from outbox.audit.topic_part import TopicOffset
from outbox.base.database import column_names
from outbox.base.settings import Settings, SinkRole
from outbox.sink import spec
from outbox.sink.repair import rebuild
from outbox.sink.spec import SinkSpec
from outbox.sink.state import TargetState

VIEW = "sink_totals"
NO_VIEW = "the sink database has no view sink_totals with columns sink, key and total"
NO_QUANTITY = "its events have no quantity"
UNDECLARED = "no job declares it; to remove it, delete its rows (docs/runbook.md)"
# The record of a dead letter without an event is invalid: it may repeat the id of an event that was applied.
PARKED = """
SELECT sink, event_id, CASE WHEN event IS NULL THEN partition END, CASE WHEN event IS NULL THEN "offset" END
  FROM dead_letters WHERE status = 'open' AND event_id IS NOT NULL
"""
NOT_DISCARDED = """
SELECT event_id FROM dead_letters WHERE sink = %s AND status <> 'discarded' AND event_id IS NOT NULL
"""


@dataclass(frozen=True)
class SinkState:
    """One sink in one snapshot."""

    name: str
    positions: Mapping[int, int] = field(default_factory=dict)  # by partition, the next offset to apply
    totals: Mapping[str, Decimal] = field(default_factory=dict)  # by key
    versions: Mapping[str, int] = field(default_factory=dict)  # by key, the highest applied
    bases: Mapping[str, int] = field(default_factory=dict)  # by key, the version up to which its total is the source's
    parked: Mapping[bytes, TopicOffset | None] = field(
        default_factory=dict
    )  # by event id; where, if only one record is
    duplicates: int = 0  # skipped, ever
    carries: Literal["events", "states"] = "events"
    takes_states: bool = False  # an applied event supersedes the earlier events of its key
    not_compared: str = ""  # why its totals are not compared, if so
    is_declared: bool = True  # otherwise nothing is expected of it

    def has_seen(self, place: TopicOffset | None) -> bool:
        """Whether the sink is past this place, or will never come there."""
        if not self.is_declared:
            return True
        return place is not None and place.offset < self.positions.get(place.partition, 0)

    def is_parked(self, event_id: bytes, place: TopicOffset | None) -> bool:
        """Whether the sink has set aside the event that the topic has first at this place."""
        if event_id not in self.parked:
            return False
        parked_at = self.parked[event_id]
        return parked_at is None or place is None or parked_at == place


def read(settings: Settings) -> list[SinkState]:
    """Every sink of this project that ever ran, by name. Sinks of other topics than their job's are left out.

    Raises Failure if a database or a target cannot be read.
    """
    specs = spec.sinks(settings)
    targets = _targets(settings, specs)  # before their dead letters
    with snapshot(settings, SinkRole.AUDITOR) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT name, duplicates FROM sinks ORDER BY name")
        duplicates: dict[str, int] = dict(cursor.fetchall())
        positions, elsewhere = _positions(cursor, settings, specs)
        has_totals, totals, versions = _totals(connection)
        bases, parked = _bases(cursor), _parked(cursor)
        states = [
            SinkState(
                name,
                positions.get(name, {}),
                totals[name],
                versions[name],
                bases[name],
                parked[name],
                skipped,
                not_compared="" if has_totals else NO_VIEW,
            )
            for name, skipped in duplicates.items()
            if name in positions or name not in elsewhere
        ]
        states = [
            state
            if targets.get(state.name) is None
            else _of_target(cursor, settings, state, targets[state.name], specs)
            for state in states
        ]
    return [_with_declaration(state, declared(specs, state.name)) for state in states]


def declared(specs: Mapping[str, SinkSpec], name: str) -> SinkSpec | None:
    """The declaration of a sink, or of the sink that it is a copy of; None if it has none any more."""
    return specs.get(name.removesuffix(rebuild.SUFFIX))


def _with_declaration(state: SinkState, found: SinkSpec | None) -> SinkState:
    """The state with what its job and strategy declare. Without a declaration nothing is compared or counted."""
    if found is None:
        return replace(state, parked={}, not_compared=UNDECLARED, is_declared=False)
    job = found.job
    return replace(
        state,
        carries=job.carries,
        takes_states=found.strategy.takes == "states",
        not_compared=NO_QUANTITY if job.carries == "events" and job.decoder.quantity is None else state.not_compared,
    )


def _of_target(
    cursor: extensions.cursor,
    settings: Settings,
    state: SinkState,
    target: TargetState,
    specs: Mapping[str, SinkSpec],
) -> SinkState:
    """The state of a sink whose result is not in the sink database: positions and dead letters as of that result.

    If that result cannot be read, its open dead letters count as set aside, as for other sinks.
    """
    if target.unread:
        return replace(state, not_compared=target.unread)
    cursor.execute(NOT_DISCARDED, [state.name])
    lacking = target.lacks([event_id for (event_id,) in cursor])
    is_current = target.topic == _topic(settings, specs.get(state.name))
    return replace(
        state,
        positions=target.positions if is_current else state.positions,
        totals=target.totals,
        versions=target.versions,
        parked={uuid.UUID(event_id).bytes: None for event_id in lacking},
        not_compared="",
    )


def _targets(settings: Settings, specs: Mapping[str, SinkSpec]) -> dict[str, TargetState]:
    found = {name: one.job.target.state(settings, one) for name, one in specs.items()}
    return {name: state for name, state in found.items() if state is not None}


def _topic(settings: Settings, declared: SinkSpec | None) -> str:
    return settings.topic if declared is None else declared.job.topic


def _positions(
    cursor: extensions.cursor, settings: Settings, specs: Mapping[str, SinkSpec]
) -> tuple[dict[str, dict[int, int]], set[str]]:
    """By sink its positions on its job's topic, and the sinks that have positions on another one."""
    found: dict[str, dict[int, int]] = defaultdict(dict)
    elsewhere = set()
    cursor.execute("SELECT sink, topic, partition, next_offset FROM positions")
    for sink, topic, partition, next_offset in cursor:
        if topic == _topic(settings, specs.get(sink)):
            found[sink][partition] = next_offset
        else:
            elsewhere.add(sink)
    return dict(found), elsewhere


def _totals(
    connection: extensions.connection,
) -> tuple[bool, dict[str, dict[str, Decimal]], dict[str, dict[str, int]]]:
    """Whether the domain offers totals; by sink and key the totals, and the versions that were applied."""
    totals: dict[str, dict[str, Decimal]] = defaultdict(dict)
    versions: dict[str, dict[str, int]] = defaultdict(dict)
    known = column_names(connection, VIEW)
    if not known >= {"sink", "key", "total"}:
        return False, totals, versions
    version = sql.SQL("version" if "version" in known else "NULL")
    with connection.cursor() as cursor:
        cursor.execute(sql.SQL("SELECT sink, key, total, {} FROM {}").format(version, sql.Identifier(VIEW)))
        for sink, key, total, highest in cursor:
            totals[sink][key] = Decimal(total)
            if highest is not None:
                versions[sink][key] = highest
    return True, totals, versions


def _parked(cursor: extensions.cursor) -> dict[str, dict[bytes, TopicOffset | None]]:
    found: dict[str, dict[bytes, TopicOffset | None]] = defaultdict(dict)
    cursor.execute(PARKED)
    for sink, event_id, partition, offset in cursor:
        found[sink][uuid.UUID(event_id).bytes] = None if partition is None else TopicOffset(partition, offset)
    return found


def _bases(cursor: extensions.cursor) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = defaultdict(dict)
    cursor.execute("SELECT sink, key, version FROM base_versions")
    for sink, key, version in cursor:
        found[sink][key] = version
    return found
