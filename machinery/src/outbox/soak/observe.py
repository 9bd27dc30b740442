"""Read what a run has left, once everything has settled. It looks at the parts directly, past the proxies."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from decimal import Decimal
from typing import Any

from outbox.audit import declared, sinks
from outbox.audit.comparison_files import Comparison as Declaration
from outbox.audit.declared import Declared, EventTopic, Kind
from outbox.audit.totals import read_totals
from outbox.base.database import connect, query
from outbox.base.settings import Settings, SinkRole, SourceRole
from outbox.kafka import records, topics
from outbox.sink.records import Records
from outbox.sink.spec import SinkSpec
from outbox.soak.domain import Domain
from outbox.soak.seen import Answer, Comparison, Event, Seen, Sink, Source

ANSWERS = "SELECT key, status, body FROM idempotency_keys ORDER BY key"
# Not that of an event that the sink has applied: of each letter the place of the record that it was written for.
OPEN_LETTERS = "SELECT sink, topic, partition, \"offset\" FROM dead_letters WHERE status <> 'replayed'"
APPLIED = "SELECT event_id::text, times FROM applied_events WHERE sink = %s"
HAS_APPLIED = "SELECT to_regclass('applied_events') IS NOT NULL"
OUTBOX = "SELECT id::text FROM outbox WHERE aggregatetype NOT LIKE '%.markers'"  # those are sent by `outbox prune`
TopicOffset = tuple[str, int, int]  # topic, partition, offset


def read(settings: Settings, domain: Domain, names: Sequence[str]) -> Seen:
    """All of it, with the sinks of these names. Raises Failure if a part cannot be read."""
    known = declared.load(settings)
    events: list[Event] = []
    kinds: dict[str, Kind] = {}
    numbers: dict[str, Mapping[str, Decimal]] = {}
    for topic in known.topics:
        for event, kind, of_event in _events(settings, known, topic):
            events.append(event)
            kinds[event.id], numbers[event.id] = kind, of_event
    places = {(event.topic, event.partition, event.offset): event.id for event in events}
    seen_sinks = _Sinks(settings, known, kinds, numbers, places)
    return Seen(
        events=sorted(events, key=lambda event: (event.topic, event.partition, event.offset)),
        source=_source(settings, domain),
        sinks=[seen_sinks.sink(known.sinks[name]) for name in names],
    )


def _events(
    settings: Settings, known: Declared, topic: EventTopic
) -> Iterator[tuple[Event, Kind, Mapping[str, Decimal]]]:
    """The valid events of a topic, each with its kind, and its numbers by property."""
    within = topics.watermarks(settings, topic.name)
    for messages in records.batches(settings, topic.name, within):
        values = {(one.partition(), one.offset()): one.value() for one in messages}
        for name, rows in topic.decoder.decode(Records.of(messages)).rows.items():
            kind = known.kinds[topic.kinds[name]]
            for row in rows.to_pylist():
                version = topic.decoder.version
                event = Event(
                    id=row["event_id"],
                    topic=topic.name,
                    partition=row["partition"],
                    offset=row["offset"],
                    key=str(row[topic.decoder.key]),
                    type=kind.schema.name,
                    version=None if version is None else row[version],
                    data=json.loads(values[row["partition"], row["offset"]] or b"{}"),
                )
                yield event, kind, {one: Decimal(row.get(one) or 0) for one in topic.properties}


def _source(settings: Settings, domain: Domain) -> Source:
    with closing(connect(settings, SourceRole.OWNER)) as connection, connection, connection.cursor() as cursor:

        def rows(query: str) -> list[tuple[Any, ...]]:
            cursor.execute(query)
            return cursor.fetchall()

        return Source(
            answers=[Answer(key, status, json.loads(body)) for key, status, body in rows(ANSWERS)],
            changes=dict(rows(domain.changes)),
            outbox=frozenset(event_id for (event_id,) in rows(OUTBOX)),
            violations={name: [text for (text,) in rows(query)] for name, query in domain.invariants.items()},
        )


class _Sinks:
    """Reads the sinks."""

    def __init__(
        self,
        settings: Settings,
        known: Declared,
        kinds: Mapping[str, Kind],
        numbers: Mapping[str, Mapping[str, Decimal]],
        places: Mapping[TopicOffset, str],
    ) -> None:
        self._known, self._kinds, self._numbers = known, kinds, numbers
        self._settings = settings
        self._states = {state.name: state for state in sinks.read(settings, known).states}
        self._source = self._totals_of_source()
        self._set_aside: dict[str, set[str]] = {}
        for sink, *place in self._rows(OPEN_LETTERS):
            event_id = places.get(tuple(place))
            if event_id is not None:
                self._set_aside.setdefault(sink, set()).add(event_id)

    def sink(self, spec: SinkSpec) -> Sink:
        """What a sink has."""
        totals = self._states[spec.name].totals if spec.name in self._states else {}
        return Sink(
            name=spec.name,
            repeats=spec.strategy.repeats,
            comparisons=[
                Comparison(
                    name=one.name,
                    totals=dict(totals[one.id].totals) if one.id in totals else {},
                    source=self._source[one.id],
                    adds=self._adds(spec, one) if one.adds else None,
                )
                for one in self._known.comparisons_of(spec.name)
            ],
            set_aside=frozenset(self._set_aside.get(spec.name, ())),
            applied=self._applied(spec.name),
        )

    def _adds(self, spec: SinkSpec, comparison: Declaration) -> dict[str, Decimal]:
        """By event id, what it adds; only events that the sink has asked for."""
        found: dict[str, Decimal] = {}
        for event_id, kind in self._kinds.items():
            adds = comparison.adds_of(kind.schema) if declared.name_in(spec, kind) is not None else None
            if adds is not None:
                number = Decimal(1) if adds.property is None else self._numbers[event_id][adds.property]
                found[event_id] = adds.sign * number
        return found

    def _totals_of_source(self) -> dict[str, Mapping[str, Decimal]]:
        with closing(connect(self._settings, SourceRole.AUDITOR)) as connection:
            return {
                one.id: dict(read_totals(connection, one, one.source)[""].totals) for one in self._known.all_comparisons
            }

    def _applied(self, sink: str) -> Mapping[str, int] | None:
        [(is_counted,)] = self._rows(HAS_APPLIED)
        return (dict(self._rows(APPLIED, sink)) or None) if is_counted else None

    def _rows(self, statement: str, *parameters: str) -> list[tuple[Any, ...]]:
        return query(self._settings, SinkRole.OWNER, statement, parameters)
