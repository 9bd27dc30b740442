"""Read how far every sink has come, its totals, and what it has set aside, in one snapshot of the sink database."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from hashlib import sha256
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from psycopg2 import extensions, sql

from outbox.audit import letters
from outbox.audit.declared import Declared
from outbox.audit.letters import Letter, has_event_id
from outbox.audit.quantity import EXACT, text_of
from outbox.audit.rows import SINK, ComparedRows, load_rows, read_sinks
from outbox.audit.source import snapshot
from outbox.base.settings import Settings, SinkRole
from outbox.sink.comparison_files import Comparison, folder_of
from outbox.sink.rows import Row, query_errors, unusable
from outbox.sink.spec import SinkSpec, TargetState

if TYPE_CHECKING:
    from outbox.audit.store import Store

NO_COMPARISON = "no file in {} says what to compare"
UNDECLARED = "no job declares it; to remove it, delete its rows (docs/runbook.md)"
# What the migrations of the machinery make. A project compares its own tables.
MACHINERY_TABLES = frozenset(
    {
        *("applied_versions", "base_versions", "checkpoint_generations", "dead_letters", "key_versions"),
        *("landed_events", "positions", "processed_changes", "processed_events", "skipped_events"),
    }
)
SINK_TABLES = """
SELECT pg_class.oid::regclass::text
  FROM pg_class
  JOIN pg_namespace ON pg_namespace.oid = relnamespace
  JOIN pg_attribute ON attrelid = pg_class.oid
 WHERE relkind IN ('r', 'p') AND NOT relispartition AND attname = 'sink' AND NOT attisdropped
   AND nspname <> 'information_schema' AND nspname NOT LIKE 'pg\\_%'
 ORDER BY 1
"""
# By the plan of a query, the tables that it scans; of a partition its table.
TABLES = """
SELECT DISTINCT coalesce(pg_partition_root(pg_class.oid), pg_class.oid)::regclass::text
  FROM jsonb_path_query(%s, 'strict $.** ? (exists (@."Relation Name"))') AS scan
  JOIN pg_namespace ON nspname = scan ->> 'Schema'
  JOIN pg_class ON relnamespace = pg_namespace.oid AND relname = scan ->> 'Relation Name'
"""


@dataclass(frozen=True)
class SinkState:
    """One sink in one snapshot."""

    name: str
    positions: Mapping[str, Mapping[int, int]] = field(default_factory=dict)  # by topic and partition, the next offset
    # By topic and key, the version up to which its result is the source's.
    bases: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    versions: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # by topic and key, the highest applied
    letters: Mapping[str, Letter] = field(default_factory=dict)  # by identity: the event id, or a hash
    discarded: Mapping[str, int] = field(default_factory=dict)  # by reason, how many dead letters
    duplicates: int = 0  # skipped, ever
    filtered: int = 0  # left out by its transform, ever
    carries: Literal["events", "states"] = "events"
    takes_states: bool = False  # an applied event supersedes the earlier events of its key
    may_be_ahead: bool = False  # it may have events behind its positions, up to the version of each key
    not_compared: str = ""  # why none of its totals is compared, if so
    is_declared: bool = True  # otherwise nothing is expected of it


@dataclass(frozen=True)
class Sinks:
    """All sinks in one snapshot."""

    states: Sequence[SinkState] = ()
    acknowledged: frozenset[str] = frozenset()
    """Identities of the records that an operator has discarded."""
    uncompared_tables: Sequence[str] = ()
    erased: frozenset[tuple[str, str]] = frozenset()
    """The keys that were erased: topic, and sha256 of the key."""

    def is_erased(self, topics: Iterable[str], key: str) -> bool:
        """Whether a key was erased on one of these topics."""
        return bool(self.erased) and any((topic, sha256(key.encode()).hexdigest()) in self.erased for topic in topics)


def read(settings: Settings, declared: Declared, store: Store) -> Sinks:
    """Every sink of this project that ever ran, by name. Sinks of other topics than their job's are left out. What is
    compared is in the store.

    Raises Failure if a database or a target cannot be read, or if a comparison cannot be used.
    """
    of_targets = ((name, one.target.state(settings, one)) for name, one in declared.sinks.items())
    targets = {name: state for name, state in of_targets if state is not None}  # read before their dead letters
    queries = _queries(declared, targets)
    with snapshot(settings, SinkRole.AUDITOR) as connection, connection.cursor() as cursor:
        in_database = ((one, read_sinks(connection, one)) for one in queries)
        elsewhere = ((one, totals_of(name, targets[name])) for name in targets for one in declared.comparisons_of(name))
        load_rows(store, SINK, chain[tuple[Comparison, Iterable[Row]]](in_database, elsewhere))
        set_aside = letters.read(connection, declared, [name for name, one in targets.items() if not one.unread])
        cursor.execute(letters.REASONS, [letters.NO_REASON])
        discarded = dict[str, dict[str, int]]()
        for name, reason, count in cursor:
            discarded.setdefault(name, {})[reason] = count
        positions = _by_topic(cursor, "SELECT sink, topic, partition, next_offset FROM public.positions")
        bases = _by_topic(cursor, "SELECT sink, topic, key, version FROM public.base_versions")
        cursor.execute("SELECT name, duplicates, filtered FROM public.sinks ORDER BY name")
        states = list[SinkState]()
        for name, duplicates, filtered in cursor:
            state = SinkState(
                name, positions.get(name, {}), bases.get(name, {}), duplicates=duplicates, filtered=filtered
            )
            spec = declared.sink(name)
            if spec is None:
                states.append(replace(state, not_compared=UNDECLARED, is_declared=False))
            elif not state.positions or not state.positions.keys().isdisjoint(spec.decoders):
                comparisons = [ComparedRows(store, one, name) for one in declared.comparisons_of(name)]
                state = replace(
                    state,
                    versions=_versions(declared, spec, comparisons),
                    letters=set_aside.get(name, {}),
                    discarded=discarded.get(name, {}),
                    carries=spec.job.carries,
                    takes_states=spec.strategy.takes == "states",
                    not_compared="" if comparisons else NO_COMPARISON.format(folder_of(spec)),
                )
                if name in targets:
                    state = with_target(state, targets[name])
                elif spec.target.is_elsewhere:
                    state = replace(state, not_compared=f"it is a copy, whose target is that of sink {spec.name}")
                states.append(state)
        cursor.execute("SELECT topic, encode(key_hash, 'hex') FROM public.erased_keys")
        erased = frozenset(map(tuple, cursor.fetchall()))
        # Nobody compares the tables in which strategies remember events.
        remembered = {one.strategy.memory.table for one in declared.sinks.values() if one.strategy.memory is not None}
        known_tables = remembered.union(*(tables_read(connection, one) for one in queries))
        return Sinks(
            states,
            letters.acknowledged(cursor, [state.name for state in states if state.is_declared]),
            uncompared_tables(cursor, known_tables),
            erased,
        )


def _versions(declared: Declared, spec: SinkSpec, compared: Iterable[ComparedRows]) -> dict[str, dict[str, int]]:
    """By topic and key the highest version that the sink has applied, as its comparisons of totals say."""
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for one in compared:
        addends = declared.addends(spec, one.comparison)
        topics = {kind.topic for kind, addend in zip(declared.kinds, addends, strict=True) if addend is not None}
        if not one.comparison.columns and len(topics or spec.decoders) == 1:
            [topic] = topics or spec.decoders
            for key, version in one.versions().items():
                found[topic][key] = max(version, found[topic].get(key, version))
    return found


def with_target(state: SinkState, target: TargetState) -> SinkState:
    """The state of a sink whose result is not in the sink database: positions and dead letters as of that result.

    If that result cannot be read, its open dead letters count as set aside, as for other sinks.
    """
    if target.unread:
        return replace(state, not_compared=target.unread)
    named = {identity for identity in state.letters if has_event_id(identity)}
    lacking = set(target.lacking({event_id for event_id in named if state.letters[event_id].is_open}))
    # The target finds events by id: any record of an event will do, not only the one that its letter names.
    mine = {
        identity: letter._replace(place=None)
        for identity, letter in state.letters.items()
        if identity in lacking or identity not in named or not letter.is_open
    }
    positions = {**state.positions, **target.positions}
    return replace(state, positions=positions, letters=mine, may_be_ahead=target.may_be_ahead)


def totals_of(sink: str, target: TargetState) -> list[Row]:
    """The totals of a sink that its target says. Several rows of a key are added up."""
    totals, versions = dict[str, Decimal](), dict[str, int]()
    for key, total, version in target.totals:
        if key is not None:
            totals[str(key)] = EXACT.add(totals.get(str(key), Decimal(0)), Decimal(total or 0))
        if key is not None and version is not None:
            versions[str(key)] = max(version, versions.get(str(key), version))
    return [(sink, key, versions.get(key), text_of(total)) for key, total in totals.items()]


def _queries(declared: Declared, targets: Mapping[str, TargetState]) -> list[Comparison]:
    """The comparisons whose totals are in the sink database."""
    found: dict[str, Comparison] = {}
    for name, of_sink in declared.comparisons.items():
        if name in targets:
            for one in [*of_sink[1:], *(one for one in of_sink if one.columns)]:
                raise unusable(one.file, f"sink {name} has one total, which its target says", "keep one file of totals")
            continue
        for one in of_sink:
            if one.sink is None:
                raise unusable(one.file, "it has no section `-- [sink]`", "write the query of the sinks' totals")
            found[one.id] = one
    return list(found.values())


def _by_topic(cursor: extensions.cursor, query: str) -> dict[str, dict[str, dict[Any, int]]]:
    found: dict[str, dict[str, dict[Any, int]]] = {}
    cursor.execute(query)
    for sink, topic, name, value in cursor:
        found.setdefault(sink, {}).setdefault(topic, {})[name] = value
    return found


def tables_read(connection: extensions.connection, comparison: Comparison) -> set[str]:
    """The tables that the query of the sinks' totals or rows reads, through views too."""
    with query_errors(connection, comparison.file), connection.cursor() as cursor:
        cursor.execute(sql.SQL("EXPLAIN (VERBOSE, FORMAT JSON) {}").format(sql.SQL(comparison.sink or "")))
        [(plans,)] = cursor.fetchall()
        cursor.execute(TABLES, [json.dumps(plans)])
        return {table for (table,) in cursor}


def uncompared_tables(cursor: extensions.cursor, read: Collection[str]) -> list[str]:
    """The project's tables with a column ``sink`` that are not among those that comparisons read."""
    cursor.execute(SINK_TABLES)
    return [table for (table,) in cursor if table not in MACHINERY_TABLES and table not in read]
