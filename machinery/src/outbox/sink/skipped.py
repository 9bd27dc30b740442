"""Which events a sink has skipped because it had not asked for them.

Positions have passed them. So a sink that asks for one of them later must not begin as if it had seen all of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from psycopg2 import extensions
from psycopg2.extras import execute_values

from outbox.base.errors import Failure
from outbox.sink.decoder import RecordDecoder

NAMES_MAX = 1000  # of undeclared events, per sink and topic: any client that writes to a topic chooses them
INSERT = "INSERT INTO skipped_events (sink, topic, event) VALUES %s ON CONFLICT DO NOTHING"


def load(cursor: extensions.cursor, sink: str) -> dict[str, set[str]]:
    """What the sink has skipped."""
    cursor.execute("SELECT topic, event FROM skipped_events WHERE sink = %s", (sink,))
    found: dict[str, set[str]] = {}
    for topic, event in cursor:
        found.setdefault(topic, set()).add(event)
    return found


def new(recorded: Collection[str], events: Iterable[str], declared: Collection[str]) -> list[str]:
    """Those of the events that are still to be recorded for a topic: the declared ones, and others up to NAMES_MAX."""
    missing, declared = {*events}.difference(recorded), {*declared}
    room = max(0, NAMES_MAX - len({*recorded} - declared))
    return sorted(missing & declared) + sorted(missing - declared)[:room]


def record(cursor: extensions.cursor, sink: str, topic: str, events: Collection[str]) -> None:
    """Record events by name, in the transaction that moves the positions past them."""
    if events:
        execute_values(cursor, INSERT, [(sink, topic, event) for event in events])


def forget(cursor: extensions.cursor, sink: str) -> None:
    """Forget what was skipped: somebody has decided where the sink begins."""
    cursor.execute("DELETE FROM skipped_events WHERE sink = %s", (sink,))


def require_none(sink: str, recorded: Mapping[str, set[str]], decoders: Mapping[str, RecordDecoder]) -> None:
    """Raise Failure `events-skipped` if the sink has skipped an event that it asks for now.

    ``recorded`` and ``decoders`` are by topic.
    """
    found = {event for topic, one in decoders.items() for event in one.asked_for & recorded.get(topic, set())}
    if found:
        raise Failure(
            f"sink {sink} asks for {', '.join(sorted(found))}, which it has skipped until now",
            f"`outbox rewind {sink} --to-earliest` applies those that its topics still have, `outbox rewind {sink} "
            "--to-positions` only those that come from now on; strategies `upsert` and `offsets` need "
            f"`outbox rebuild {sink} --from topic` for the earlier ones",
            code="events-skipped",
        )
