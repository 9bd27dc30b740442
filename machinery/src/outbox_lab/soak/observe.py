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
from outbox.base.database import Row, connect, query
from outbox.base.errors import Failure
from outbox.base.settings import Role, Settings, SinkRole, SourceRole
from outbox.kafka import records, topics
from outbox.relay import connectors
from outbox.relay.connectors import Connector
from outbox.sink.applying.lakehouse import table
from outbox.sink.applying.lakehouse.target import LakehouseTarget
from outbox.sink.comparison_files import Comparison, folder_of
from outbox.sink.decoding.records import Records
from outbox.sink.decoding.values import rows_of
from outbox.sink.spec import SinkSpec
from outbox_lab.soak.domain import Domain, Effects, options_of
from outbox_lab.soak.seen import (
    ComparedTotals,
    Copy,
    RowChange,
    Seen,
    Sink,
    Source,
    StoredAnswer,
    TopicEvent,
)

if TYPE_CHECKING:
    from outbox.audit.store import Store

ANSWERS = "SELECT key, status, body FROM public.idempotency_keys ORDER BY key"
# Not that of an event that the sink has applied: of each letter the place of the record that it was written for.
OPEN_LETTERS = "SELECT sink, topic, partition, \"offset\" FROM public.dead_letters WHERE status <> 'replayed'"
APPLIED = "SELECT event_id::text, times FROM public.applied_events WHERE sink = %s"
REMEMBERED = "SELECT concat_ws(' ', {by}) FROM public.{table} WHERE sink = %s"
HORIZON = "SELECT horizon::text FROM public.dedup_horizon"
# `outbox prune` sends the markers.
OUTBOX = "SELECT id::text FROM public.outbox WHERE aggregatetype NOT LIKE '%.markers'"
ROWS = "SELECT to_jsonb(found.*)::text FROM ({}) AS found"


def read(settings: Settings, domain: Domain, names: Sequence[str]) -> Seen:
    """Everything that the judge compares, with the sinks of these names. Rows of comparisons are not among it: `outbox
    check` compares them at the end. Raises Failure if a part cannot be read.
    """
    from outbox.audit.store import Store

    known = described(settings, declared.load(settings))
    specs = [known.sinks[name] for name in names]
    captured = Captured(settings, specs)
    events = [event for topic in known.topics for event in _events(settings, known, topic)]
    events.sort(key=lambda one: one.position)
    with closing(Store()) as store:
        seen_sinks = _Sinks(settings, known, events, captured, store, handlers=options_of(domain).handlers)
        of_sinks = [seen_sinks.sink(one) for one in specs]
    return Seen(
        events=events,
        source=_source(settings, domain),
        sinks=of_sinks,
        row_changes=captured.changes,
        copies=captured.copies(domain),
    )


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
        captured: Captured,
        store: Store,
        *,
        handlers: Mapping[str, Effects],
    ) -> None:
        self._known, self._events, self._settings, self._handlers = known, events, settings, handlers
        self._captured, self._store = captured, store
        self._states = {state.name: state for state in sinks.read(settings, known, store).states}
        with closing(connect(settings, SourceRole.AUDITOR)) as connection:
            load_rows(store, SOURCE, ((one, read_source(connection, one)) for one in known.all_comparisons))
        [(self._horizon,)] = self._rows(HORIZON)
        own = {one.position: one.id for one in events} | {one.position: one.identity for one in captured.changes}
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
        """See `forgotten`; of captured tables, the identities of their changes.

        A transform may leave events out, so nobody knows which its sink has to remember.
        """
        memory = spec.strategy.memory
        if memory is None or not (memory.is_of_ids or memory.is_of_changes):
            return frozenset()
        statement = REMEMBERED.format(table=memory.table, by=", ".join(memory.by))
        remembered = {identity for (identity,) in self._rows(statement, spec.name)}
        if memory.is_of_changes:
            return frozenset(one.identity for one in self._captured.changes if one.topic in spec.decoders) - remembered
        if spec.job.transform is not None or spec.name not in self._states:
            return frozenset()
        return forgotten(self._events, types, remembered, self._horizon, self._states[spec.name].bases)

    def _rows(self, statement: str, *parameters: str) -> list[tuple[Any, ...]]:
        return query(self._settings, SinkRole.OWNER, statement, parameters)


# Captured tables: each has a connector and a topic of its own ------------------------------------------------------


def captures_of(settings: Settings, specs: Iterable[SinkSpec]) -> list[Connector]:
    """The connectors of the captured tables that these sinks read."""
    read = {topic for one in specs for topic in one.decoders}
    return [one for one in connectors.others(settings) if one.topic in read]


def require_copies(settings: Settings, domain: Domain, specs: Iterable[SinkSpec]) -> None:
    """Raises Failure if the domain does not say how to compare what these sinks have of captured tables."""
    specs = list(specs)
    captured = {one.topic for one in captures_of(settings, specs)}
    reading = {one.name for one in specs if not captured.isdisjoint(one.decoders)}
    if missing := sorted(reading - options_of(domain).copies.keys()):
        raise Failure(
            f"the soak does not know which rows of a captured table {', '.join(missing)} must have",
            "write `copies` of the soak's domain, as docs/soak.md shows, or leave the sink out of the soak",
            code="soak-domain-wrong",
        )


class Captured:
    """The captured tables after a run, and their changes on the topics."""

    def __init__(self, settings: Settings, specs: Sequence[SinkSpec]) -> None:
        self._settings, self._specs = settings, specs
        self._topics = [one.topic for one in captures_of(settings, specs)]
        changes = (one for topic in self._topics for one in self._changes(topic))
        self.changes = sorted(changes, key=lambda one: one.position)

    def copies(self, domain: Domain) -> list[Copy]:
        """The rows of source and sinks. Raises Failure if a query of the domain cannot be used."""
        return [self._copy(domain, one, topic) for topic in self._topics for one in self._readers(topic)]

    def _changes(self, topic: str) -> Iterator[RowChange]:
        """The changes on the topic of a captured table that a sink takes.

        Their content is what Debezium has written, and not what the sink's decoder makes of it.
        """
        decoder = self._readers(topic)[0].decoders[topic]
        for messages in records.batches(self._settings, topic, topics.watermarks(self._settings, topic)):
            taken = {
                place
                for rows in decoder.decode(Records.of_messages(messages)).rows.values()
                for place in zip(rows["partition"], rows["offset"], strict=True)
            }
            for message in messages:
                partition, offset = message.partition() or 0, message.offset() or 0
                if (partition, offset) in taken:
                    key, value = _json(message.key()), _json(message.value())
                    yield RowChange(
                        topic=topic,
                        partition=partition,
                        offset=offset,
                        table=value["source"]["table"],
                        key=str(next(iter(key.values()))) if len(key) == 1 else json.dumps(key),
                        lsn=value["source"]["lsn"],
                        op=value["op"],
                        row=value["after"] or {},
                    )

    def _readers(self, topic: str) -> list[SinkSpec]:
        return [one for one in self._specs if topic in one.decoders]

    def _copy(self, domain: Domain, spec: SinkSpec, topic: str) -> Copy:
        given = options_of(domain).copies[spec.name]
        source, rows = self._rows(SourceRole.OWNER, given.source), self._rows(SinkRole.OWNER, given.sink)
        columns = {given.key} | ({given.version} if given.version else set())
        if lacking := {name for row in (*source, *rows) for name in columns - row.keys()}:
            raise Failure(
                f"the queries of {spec.name} return no column {', '.join(sorted(lacking))}",
                "correct `copies` of the soak's domain",
                code="soak-domain-wrong",
            )
        return Copy(spec.name, topic, given.key, given.version, source, rows)

    def _rows(self, role: Role, sql: str) -> list[Row]:
        return [_json(row) for (row,) in query(self._settings, role, ROWS.format(sql.strip().rstrip(";")))]


def _json(text: str | bytes | None) -> Any:
    """A JSON value. Fractions stay as they are written, so that nothing is rounded."""
    return json.loads(text or b"null", parse_float=str)
