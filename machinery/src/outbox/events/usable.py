"""Which declarations can be used: keys, columns, and topics that aggregates share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from outbox.base.errors import Failure
from outbox.events.aggregate import Aggregate
from outbox.events.room import LIMIT, ROW_MAX_BYTES, row_bytes
from outbox.events.schema import Column, EventSchema, SqlType

KEY_TYPES: set[SqlType] = {"uuid", "text", "bigint"}  # of which a record's key is the text
RESERVED = {"event_id", "event_type", "partition", "offset"}  # columns of every batch
RESERVED_PREFIX = "outbox_"  # of the other columns of ours
SYSTEM = {"tableoid", "xmin", "cmin", "xmax", "cmax", "ctid"}  # columns of every table of Postgres
NAME_MAX_BYTES = 51  # with its SQL type behind it, as in `placed_at:timestamptz`, it is a name of Postgres
NAME_WITHOUT = set('":%')  # characters with a meaning in SQL, or in the names of columns


def require_schema(schema: EventSchema, key: str, version: str | None) -> None:
    """Raises Failure if a payload lacks the key or the version, or if a property cannot be a column."""
    columns = {column.name: column for column in schema.columns}
    uses: list[tuple[str, str | None, set[SqlType]]] = [("key", key, KEY_TYPES), ("version", version, {"bigint"})]
    for use, name, types in uses:
        if name is not None and (name not in columns or columns[name].is_nullable or columns[name].type not in types):
            raise _unusable(
                f"event {schema.name}: {name} cannot be the {use} of its events",
                f"the {use} is a required property that is never null and becomes {' or '.join(sorted(types))}; an "
                "integer becomes bigint if minimum and maximum keep it within 64 bits",
            )
    for problem, remedy in _column_problems(schema.columns):
        raise _unusable(f"event {schema.name}: {problem}", remedy)


def require_own_names(names: Sequence[str]) -> None:
    """Raises Failure if two aggregate types differ in case only: one folder to some file systems."""
    for name, twin in _twins(names):
        raise Failure(
            f"aggregate types {name} and {twin} differ in case only", "rename one", code="event-declared-twice"
        )


def require_topics(topics: Mapping[str, Sequence[Aggregate]], topic_prefix: str) -> None:
    """Raises Failure if a topic has a name that another one claims, or if its aggregates cannot share it."""
    defaults = {
        f"{topic_prefix}.{aggregate.name}": aggregate for aggregates in topics.values() for aggregate in aggregates
    }
    spelled: dict[str, str] = {}
    for topic, aggregates in topics.items():
        owner = defaults.get(topic)
        if owner is not None and owner.topic != topic:
            raise _shared_wrongly(
                f"aggregate {_names(aggregates)} has topic {topic}, which is the default one of {owner.name}",
                f"choose another name, or put {owner.name} on it too",
            )
        twin = spelled.setdefault(topic.replace(".", "_"), topic)
        if twin != topic:
            raise _shared_wrongly(
                f"topics {twin} and {topic} differ in . and _ only, which Kafka refuses", "rename one"
            )
        _require_one_order(topic, aggregates)


def _require_one_order(topic: str, aggregates: Sequence[Aggregate]) -> None:
    """The events of a key on a topic are in one order, whichever aggregates they are of."""
    if len({(one.key, one.version, one.partitions) for one in aggregates}) > 1:
        raise _shared_wrongly(
            f"aggregates {_names(aggregates)} share topic {topic} and differ in key, version or partitions",
            "on one topic the events of a key are numbered together; give them the same, or topics of their own",
        )
    owners: dict[str, str] = {}
    for aggregate in aggregates:
        for type_ in aggregate.events:
            if owners.setdefault(type_, aggregate.name) != aggregate.name:
                raise Failure(
                    f"topic {topic} has two events called {type_}, of {owners[type_]} and of {aggregate.name}",
                    "a record has the event's type and not its aggregate: rename one, or give them topics of their own",
                    code="event-declared-twice",
                )
    schemas = [schema for aggregate in aggregates for schema in aggregate.schemas]
    types = {column.type for one in schemas for column in one.columns if column.name == aggregates[0].key}
    if len(types) > 1:
        raise _unusable(
            f"the key {aggregates[0].key} of the events on topic {topic} is {' and '.join(sorted(types))}",
            "let it have one type in all of them",
        )


def name_problem(name: str) -> tuple[str, str] | None:
    """Why no column of a sink's tables can have this name, and what to do; None if one can."""
    if name in SYSTEM:
        return f"{name} is a column of every table of Postgres", "choose another name"
    if name.lower().startswith(RESERVED_PREFIX):
        return f"{name} is a column of ours, or may be one", f"choose a name that does not begin with {RESERVED_PREFIX}"
    if not name.isprintable() or NAME_WITHOUT & set(name) or not 0 < len(name.encode()) <= NAME_MAX_BYTES:
        remedy = f'1 to {NAME_MAX_BYTES} bytes of characters that print, none of them ", : or %'
        return f"{name!r} cannot be a column", remedy
    return None


def _column_problems(columns: Sequence[Column]) -> Iterator[tuple[str, str]]:
    names = [column.name for column in columns]
    for name in names:
        if name.lower() in RESERVED:
            yield f"{name} is a column of ours", "give the property another name"
        if (problem := name_problem(name)) is not None:
            yield problem
    for name, twin in _twins(names):
        yield f"properties {name} and {twin} differ in case only, which Spark takes for one column", "rename one"
    if row_bytes(columns) > ROW_MAX_BYTES:
        yield f"its {len(names)} properties need {row_bytes(columns)} bytes of a row", f"{LIMIT}; nest some of them"


def _twins(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    spelled: dict[str, str] = {}
    for name in names:
        twin = spelled.setdefault(name.lower(), name)
        if twin != name:
            yield twin, name


def _names(aggregates: Sequence[Aggregate]) -> str:
    return ", ".join(aggregate.name for aggregate in aggregates)


def _unusable(problem: str, remedy: str) -> Failure:
    return Failure(problem, remedy, code="event-declaration-unusable")


def _shared_wrongly(problem: str, remedy: str) -> Failure:
    return Failure(problem, remedy, code="topic-shared-wrongly")
