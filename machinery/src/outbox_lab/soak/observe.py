"""Read what a run has left, once everything has settled: directly from the parts, past the proxies."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from decimal import Decimal
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from outbox.audit import declared, sinks
from outbox.audit.declared import Declared, EventTopic, Kind
from outbox.audit.rows import SINK, SOURCE, ComparedRows, described, load_rows, read_source
from outbox.base.database import connect, query
from outbox.base.errors import Failure
from outbox.base.settings import Settings, SinkRole, SourceRole
from outbox.kafka import records, topics
from outbox.sink.applying.lakehouse import table
from outbox.sink.applying.lakehouse.target import LakehouseTarget
from outbox.sink.comparison_files import Comparison, folder_of
from outbox.sink.decoding.records import Records
from outbox.sink.decoding.values import rows_of
from outbox.sink.spec import SinkSpec
from outbox_lab.soak.domain import Domain, Effects, options_of
from outbox_lab.soak.history import ComparedTotals, Seen, Sink, Source, StoredAnswer, TopicEvent

if TYPE_CHECKING:
    from outbox.audit.store import Store

ANSWERS = "SELECT key, status, body FROM public.idempotency_keys ORDER BY key"
# Not that of an event that the sink has applied: of each letter the place of the record that it was written for.
OPEN_LETTERS = "SELECT sink, topic, partition, \"offset\" FROM public.dead_letters WHERE status <> 'replayed'"
APPLIED = "SELECT event_id::text, times FROM public.applied_events WHERE sink = %s"
REMEMBERED = "SELECT event_id::text FROM public.{table} WHERE sink = %s"
HORIZON = "SELECT horizon::text FROM public.dedup_horizon"
# `outbox prune` sends the markers.
OUTBOX = "SELECT id::text FROM public.outbox WHERE aggregatetype NOT LIKE '%.markers'"


def read(settings: Settings, domain: Domain, names: Sequence[str]) -> Seen:
    """Everything that the judge compares, with the sinks of these names. Rows of comparisons are not among it: `outbox
    check` compares them at the end. Raises Failure if a part cannot be read.
    """
    from outbox.audit.store import Store

    known = described(settings, declared.load(settings))
    specs = [known.sinks[name] for name in names]
    events = [event for topic in known.topics for event in _events(settings, known, topic)]
    events.sort(key=lambda one: one.position)
    with closing(Store()) as store:
        seen_sinks = _Sinks(settings, known, events, store, handlers=options_of(domain).handlers)
        of_sinks = [seen_sinks.sink(one) for one in specs]
    return Seen(events, _source(settings, domain), of_sinks)


def _events(settings: Settings, known: Declared, topic: EventTopic) -> Iterator[TopicEvent]:
    """The valid events of a topic."""
    for messages in records.batches(settings, topic.name, topics.watermarks(settings, topic.name)):
        values = {(one.partition(), one.offset()): one.value() for one in messages}
        for name, columns in topic.decoder.decode(Records.of_messages(messages)).rows.items():
            kind = known.kinds[topic.kinds[name]]
            for row in rows_of(columns):
                version = topic.decoder.version
                yield TopicEvent(
                    id=row["event_id"],
                    topic=topic.name,
                    partition=row["partition"],
                    offset=row["offset"],
                    key=str(row[topic.decoder.key]),
                    type=kind.schema.name,
                    version=None if version is None else row[version],
                    data=msgspec.json.decode(values[row["partition"], row["offset"]] or b"{}"),
                    numbers={one: Decimal(row.get(one) or 0) for one in topic.properties},
                )


def _source(settings: Settings, domain: Domain) -> Source:
    with closing(connect(settings, SourceRole.OWNER)) as connection, connection, connection.cursor() as cursor:

        def rows(query: str) -> list[tuple[Any, ...]]:
            cursor.execute(query)
            return cursor.fetchall()

        changes = rows(domain.changes)
        times = Counter(name for name, _ in changes)
        return Source(
            answers=[StoredAnswer(key, status, json.loads(body)) for key, status, body in rows(ANSWERS)],
            changes=dict(changes),
            changed_twice=frozenset(name for name, count in times.items() if count > 1),
            outbox=frozenset(event_id for (event_id,) in rows(OUTBOX)),
            violations={name: [text for (text,) in rows(query)] for name, query in domain.invariants.items()},
        )


# Sinks -------------------------------------------------------------------------------------------------------------


def forgotten(
    events: Iterable[TopicEvent],
    types: Container[str],
    remembered: Container[str],
    horizon: str = "",
    bases: Mapping[str, Mapping[str, int]] = MappingProxyType({}),
) -> frozenset[str]:
    """The ids of the events that a sink asks for, that its strategy has to remember, and that it does not.

    It may forget ids below the horizon, and what a rebuild took from the source: ``bases`` has the versions of that, by
    topic and key.
    """

    def may_forget(event: TopicEvent) -> bool:
        base = bases.get(event.topic, {}).get(event.key, 0)
        return event.id < horizon or (event.version is not None and event.version <= base)

    due = (event for event in events if event.type in types and event.id not in remembered)
    return frozenset(event.id for event in due if not may_forget(event))


class _Sinks:
    """Reads the sinks."""

    def __init__(
        self,
        settings: Settings,
        known: Declared,
        events: Sequence[TopicEvent],
        store: Store,
        *,
        handlers: Mapping[str, Effects],
    ) -> None:
        self._settings, self._known, self._events, self._handlers = settings, known, events, handlers
        self._store = store
        self._states = {state.name: state for state in sinks.read(settings, known, store).states}
        with closing(connect(settings, SourceRole.AUDITOR)) as connection:
            load_rows(store, SOURCE, ((one, read_source(connection, one)) for one in known.all_comparisons))
        [(self._horizon,)] = self._rows(HORIZON)
        own = {one.position: one.id for one in events}
        self._set_aside: dict[str, set[str]] = defaultdict(set)
        for sink, *position in self._rows(OPEN_LETTERS):
            if tuple(position) in own:  # else the record is invalid
                self._set_aside[sink].add(own[tuple(position)])

    def sink(self, spec: SinkSpec) -> Sink:
        """The state of a sink. Raises Failure if nothing says what it must have."""
        comparisons = self._known.comparisons_of(spec.name)
        effects = self._effects(spec)
        if not comparisons and effects is None:
            raise Failure(
                f"sink {spec.name} has no comparison, so nothing says what it must have",
                f"write one in {folder_of(spec)} (docs/projections.md), or leave the sink out of the soak",
                code="comparison-missing",
            )
        kinds = [kind for kind in self._known.kinds if declared.name_in(spec, kind) is not None]
        types = frozenset(kind.schema.name for kind in kinds)
        return Sink(
            name=spec.name,
            repeats=spec.strategy.repeats,
            comparisons=[self._comparison(spec.name, kinds, one) for one in comparisons if not one.columns],
            set_aside=frozenset(self._set_aside[spec.name]),
            applied=dict(self._rows(APPLIED, spec.name)) if "applied_events" in spec.strategy.select else None,
            forgotten=self._forgotten(spec, types),
            rows=table.rows(self._settings, spec.name) if type(spec.target) is LakehouseTarget else None,
            effects=effects,
            types=frozenset() if effects is None else types,
        )

    def _effects(self, spec: SinkSpec) -> Mapping[str, Sequence[str]] | None:
        """By key, the events of the effects of a handler, or of the committed records that a sink has written, in
        their order. None of other sinks.
        """
        found: dict[str, list[str]] = defaultdict(list)
        for topic in spec.target.topics:
            for message in records.read(self._settings, topic, topics.watermarks(self._settings, topic)):
                event_id = dict(records.headers_of(message)).get("id")
                found[(message.key() or b"").decode()].append((event_id or b"").decode())
        if spec.name in self._handlers:
            for key, event_id in self._rows(self._handlers[spec.name].query):
                found[key].append(event_id)
        return found if spec.target.topics or spec.name in self._handlers else None

    def _comparison(self, sink: str, kinds: Sequence[Kind], declaration: Comparison) -> ComparedTotals:
        rows = ComparedRows(self._store, declaration, sink)
        of_kinds = {kind.schema.name: declaration.adds_of(kind.schema) for kind in kinds}
        adds = {name: one for name, one in of_kinds.items() if one}
        return ComparedTotals(
            name=declaration.name,
            totals=rows.totals(SINK),
            source=rows.totals(SOURCE),
            adds=adds if declaration.adds else None,
            versions=rows.versions() or None,
        )

    def _forgotten(self, spec: SinkSpec, types: frozenset[str]) -> frozenset[str]:
        """See `forgotten`. A transform may leave events out, so nobody knows which its sink has to remember."""
        memory = spec.strategy.memory
        if memory is None or not memory.is_of_ids or spec.job.transform is not None or spec.name not in self._states:
            return frozenset()
        remembered = {event_id for (event_id,) in self._rows(REMEMBERED.format(table=memory.table), spec.name)}
        return forgotten(self._events, types, remembered, self._horizon, self._states[spec.name].bases)

    def _rows(self, statement: str, *parameters: str) -> list[tuple[Any, ...]]:
        return query(self._settings, SinkRole.OWNER, statement, parameters)
