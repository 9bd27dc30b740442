"""The value that says what a sink asks for: strategy, topics, and the events of each with their versions.

The sink keeps this as one value. Its positions and its strategy's memory are of that value. So a job that asks for
something else than at the sink's last start does not start until a person has decided: a new strategy remembers
nothing, an event that is asked for now has been passed, and one that is no longer asked for leaves a gap.

An event that no topic has had yet needs no decision. To know that, a sink records the names of the events that it
passes because it has not asked for them (`skipped_events`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from outbox.base.errors import Failure
from outbox.base.heavy import extensions, extras
from outbox.sink.decoding.decoder import RecordDecoder
from outbox.sink.remembering import positions

NAMES_MAX = 1000  # of undeclared events, per sink and topic: any client that writes to a topic chooses them
READ = "SELECT asked_for FROM public.sinks WHERE name = %s"
WRITE = """
UPDATE public.sinks SET asked_for = %(asked)s::jsonb
 WHERE name = %(sink)s AND asked_for IS DISTINCT FROM %(asked)s::jsonb
"""
RECORD = "INSERT INTO public.skipped_events (sink, topic, event) VALUES %s ON CONFLICT DO NOTHING"

Value = Mapping[str, Any]  # {"strategy": NAME, "topics": {TOPIC: {EVENT: [VERSION, …]}}}


class Asked(NamedTuple):
    """A job's demand: its strategy by name, and by topic the decoder of its events."""

    sink: str
    strategy: str
    decoders: Mapping[str, RecordDecoder]

    @property
    def value(self) -> Value:
        """The value that the sink keeps, as JSON."""
        topics = {
            topic: {name: sorted(versions) for name, versions in sorted(decoder.wanted_versions.items())}
            for topic, decoder in sorted(self.decoders.items())
        }
        return {"strategy": self.strategy, "topics": topics}


def problem(cursor: extensions.cursor, asked: Asked) -> Failure | None:
    """Why the sink does not start: Failure `job-changed` if its job asks for something else than at its last start.

    None if nothing is different, or if only events are new that no topic has had yet.
    """
    stored, now = _read(cursor, asked.sink), asked.value
    if stored is None or stored == now:
        return None
    if stored["strategy"] != now["strategy"]:
        return _strategy_changed(asked, stored)
    changes = _changes(stored, now, skipped(cursor, asked.sink), asked.decoders)
    if not changes:
        return None
    remedy = (
        f"decide: `outbox rewind {asked.sink} --to-positions` goes on with what comes from now on, "
        f"`outbox rewind {asked.sink} --to-earliest` first reads again what its topics still have"
    )
    return Failure(
        f"sink {asked.sink}: its job {'; its job '.join(changes)}",
        positions.remedy(asked.sink, remedy),
        code="job-changed",
    )


def store(cursor: extensions.cursor, asked: Asked) -> bool:
    """Store what the job asks for, in a transaction with the sink's lock, and return whether that is something else
    than before.
    """
    cursor.execute(WRITE, {"asked": json.dumps(asked.value), "sink": asked.sink})
    return bool(cursor.rowcount)


def decide(cursor: extensions.cursor, asked: Asked) -> bool:
    """Let the sink ask for what its job asks for now: a person has decided where it continues.

    Returns whether that is something else than before.
    """
    is_changed = store(cursor, asked)
    for topic, decoder in asked.decoders.items():
        cursor.execute(
            "DELETE FROM public.skipped_events WHERE sink = %s AND topic = %s AND event = ANY(%s)",
            (asked.sink, topic, list(decoder.wanted_names)),
        )
    return is_changed


def require_same_strategy(cursor: extensions.cursor, asked: Asked) -> None:
    """Raises Failure `job-changed` if the sink's results are those of another strategy."""
    stored = _read(cursor, asked.sink)
    if stored is not None and stored["strategy"] != asked.strategy:
        raise _strategy_changed(asked, stored)


def skipped(cursor: extensions.cursor, sink: str) -> dict[str, set[str]]:
    """By topic the names of the events that the sink has passed without asking for them."""
    cursor.execute("SELECT topic, event FROM public.skipped_events WHERE sink = %s", (sink,))
    found: dict[str, set[str]] = {}
    for topic, event in cursor:
        found.setdefault(topic, set()).add(event)
    return found


def new_names(recorded: Collection[str], events: Iterable[str], declared: Collection[str]) -> list[str]:
    """The events that are still to be recorded for a topic: the declared ones, and others up to NAMES_MAX."""
    missing, declared = {*events}.difference(recorded), {*declared}
    room = max(0, NAMES_MAX - len({*recorded} - declared))
    return sorted(missing & declared) + sorted(missing - declared)[:room]


def record(cursor: extensions.cursor, sink: str, topic: str, events: Collection[str]) -> None:
    """Record events by name, in the transaction that moves the positions past them."""
    if events:
        extras.execute_values(cursor, RECORD, [(sink, topic, event) for event in events])


def _changes(
    stored: Value, now: Value, passed: Mapping[str, set[str]], decoders: Mapping[str, RecordDecoder]
) -> Sequence[str]:
    """The differences about which a person must decide, as the ends of a sentence."""
    before, after = _pairs(stored), _pairs(now)
    asked_again = {event for topic, one in decoders.items() for event in one.wanted_names & passed.get(topic, set())}
    changes = []
    if before - after:
        changes.append(f"no longer asks for {', '.join(sorted(before - after))}")
    if asked_again:
        changes.append(f"asks for {', '.join(sorted(asked_again))}, which the sink has passed until now")
    return changes


def _strategy_changed(asked: Asked, stored: Value) -> Failure:
    remedy = (
        f"`outbox rebuild {asked.sink} --from topic` (or `--from source`) begins with the new one; or give the job "
        "another name"
    )
    return Failure(
        f"sink {asked.sink}: its job has the strategy {asked.strategy}, which remembers nothing of what "
        f"{stored['strategy']} has applied",
        positions.remedy(asked.sink, remedy),
        code="job-changed",
    )


def _pairs(value: Value) -> set[str]:
    return {
        f"{event} (version {version})" if version else event
        for events in value["topics"].values()
        for event, versions in events.items()
        for version in versions or [None]
    }


def _read(cursor: extensions.cursor, sink: str) -> Value | None:
    cursor.execute(READ, (sink,))
    row = cursor.fetchone()
    found: Value | None = row[0] if row else None
    return found
