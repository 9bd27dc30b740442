"""The catalog of a project's events: what each folder of connect/events declares.

    connect/events/order/aggregate.toml              key, version, topic, partitions, source, published
    connect/events/order/placed.v1.schema.json       the payload of event type `placed`, version 1
    connect/events/order/upcast.py                   from older versions to newer ones (outbox/events/upcasting.py)
    connect/events/common.schema.json                what the others share by `$ref`

An event is called ``order.placed``, one version of it ``order.placed.v1``. `append`, topics, routing, decoding,
`check` and retention all ask here.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outbox.base import project
from outbox.base.errors import Failure
from outbox.events import upcasting
from outbox.events.references import bundle, has
from outbox.events.schema import PERSONAL, Column, EventSchema, SqlType
from outbox.events.upcasting import Upcaster

if TYPE_CHECKING:
    from outbox.base.settings import Settings  # `append` works without python-dotenv

AGGREGATE_FILE = "aggregate.toml"
# A type that ends in `.v1` would look like a version of another type.
TYPE = re.compile(r"(?!.*\.v[0-9]+\Z)[A-Za-z_][A-Za-z0-9_.-]{0,99}")
VERSION = re.compile(r"[1-9][0-9]{0,3}")
SCHEMA_FILE = re.compile(r"(?P<type>.*)\.v(?P<version>[^.]*)\.schema\.json")
EXAMPLE = "TYPE.vN.schema.json, such as placed.v1.schema.json"
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,99}")
TOPIC = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,249}")  # as Kafka has it
OPTIONS: dict[str, type] = {
    **dict.fromkeys(("key", "version", "topic", "source"), str),
    "partitions": int,
    "published": bool,
}
KNOWN = "known are key, version, topic, source (texts), partitions (a number) and published (true or false)"

KEY_TYPES: set[SqlType] = {"uuid", "text", "bigint"}  # of which a record's key is the text
RESERVED = {"event_id", "event_type", "partition", "offset"}  # columns of every batch
RESERVED_PREFIX = "outbox_"  # of the other columns of ours
SYSTEM = {"tableoid", "xmin", "cmin", "xmax", "cmax", "ctid"}  # columns of every table of Postgres
NAME_MAX_BYTES = 51  # with its SQL type behind it, as in `placed_at:timestamptz`, it is a name of Postgres
NAME_WITHOUT = set('":%')  # characters with a meaning in SQL, or in the names of columns

# How many columns of events one row of Postgres has room for. Postgres keeps a row in one page of 8 kB. It moves long
# values out of the row, but only those of more than 24 bytes. So a row of many short values may not fit, whatever their
# average length. The limits here hold for every value that the columns can have, and leave room for the columns that a
# sink adds; `tests/integration/test_adopters_events.py` measures them on a real Postgres.
BYTES: Mapping[SqlType, int] = {"text": 24, "numeric": 24, "jsonb": 24, "uuid": 16}  # aligned; any other takes 8
ROW_MAX_BYTES = 7680  # of 8160; the row's header, its bitmap of NULLs, and a sink's own columns take the rest
COLUMNS_MAX = 1500  # of 1600 that a table may have
LIMIT = (
    f"a row has room for {ROW_MAX_BYTES} bytes: 24 for each text, number without bounds or nested value, "
    "16 for a uuid, 8 for any other"
)


@dataclass(frozen=True)
class Aggregate:
    """An aggregate type: its topic, and its events by type and version."""

    name: str
    topic: str
    key: str
    """The property, in each payload, that repeats the record's key."""
    version: str | None = None
    """The property that numbers the events of a key: 1, 2, 3 and so on."""
    partitions: int = 4
    source: str | None = None
    """A view of the source database with the state of each entity: columns key, version, and what rebuilds read."""
    published: bool = True
    """Whether readers may rely on the events. Those of a sample, or of work in progress, may still be edited."""
    events: Mapping[str, Mapping[int, EventSchema]] = field(default_factory=dict)

    @property
    def schemas(self) -> list[EventSchema]:
        """Every version of every event."""
        return [schema for versions in self.events.values() for schema in versions.values()]


@dataclass(frozen=True)
class Wanted:
    """An event that a reader has asked for. Its rows have the columns of ``schema``.

    ``accepts``: by version, what brings a payload to that of ``schema``; None for its own version.
    """

    name: str
    schema: EventSchema
    accepts: Mapping[int, tuple[EventSchema, Upcaster | None]]
    by_aggregate: bool = False
    """Whether it was asked for by the aggregate type, together with all others of it."""

    @property
    def by_version(self) -> bool:
        """Whether one version was asked for alone."""
        return self.name == self.schema.name


@dataclass(frozen=True)
class Catalog:
    """The declared events, by aggregate type."""

    folder: Path
    aggregates: Mapping[str, Aggregate]

    @property
    def schemas(self) -> list[EventSchema]:
        """Every declared version of every event."""
        return [schema for aggregate in self.aggregates.values() for schema in aggregate.schemas]

    @property
    def is_personal(self) -> bool:
        """Whether an event has personal data."""
        return any(schema.is_personal for schema in self.schemas)

    @property
    def topics(self) -> dict[str, list[Aggregate]]:
        """The aggregates by topic."""
        found: dict[str, list[Aggregate]] = {}
        for aggregate in self.aggregates.values():
            found.setdefault(aggregate.topic, []).append(aggregate)
        return found

    def schema(self, aggregate: str, type_: str, version: int) -> EventSchema:
        """One version of an event. Raises Failure `event-undeclared` if it is not declared."""
        known = self.aggregates.get(aggregate)
        found = known.events.get(type_, {}).get(version) if known is not None else None
        if found is None:
            raise Failure(
                f"event {aggregate}.{type_}.v{version} is not declared",
                f"declare it in {self.folder / aggregate / f'{type_}.v{version}.schema.json'};"
                " `outbox events` lists what is declared",
                code="event-undeclared",
            )
        return found

    def wanted(self, names: Sequence[str]) -> list[Wanted]:
        """The events of these names: an aggregate type, an event, or one version of an event.

        An event stands for all its versions, each of which must lead to the newest by upcasters. Raises Failure if a
        name is not declared, if two names have a version in common, or if an upcaster is missing.
        """
        found: list[Wanted] = []
        owners: dict[str, str] = {}
        for name in names:
            for one in self._wanted(name):
                for schema, _ in one.accepts.values():
                    if schema.name in owners:
                        raise Failure(
                            f"{schema.name} is asked for twice: by {owners[schema.name]} and by {name}",
                            "name each event once: its aggregate type, the event, or versions of it",
                            code="events-overlap",
                        )
                    owners[schema.name] = name
                found.append(one)
        return found

    def _wanted(self, name: str) -> list[Wanted]:
        found: list[Wanted] = []
        for aggregate in self.aggregates.values():
            for type_, versions in aggregate.events.items():
                event = f"{aggregate.name}.{type_}"
                if name in (aggregate.name, event):
                    found.append(replace(self._newest(event, versions), by_aggregate=name == aggregate.name))
                found += [
                    Wanted(name, schema, {version: (schema, None)})
                    for version, schema in versions.items()
                    if name == schema.name
                ]
        if not found:
            remedy = "`outbox events` lists what is declared"
            raise Failure(f"there is no event {name}", remedy, code="event-undeclared")
        return found

    def _newest(self, event: str, versions: Mapping[int, EventSchema]) -> Wanted:
        ordered = [versions[version] for version in sorted(versions)]
        file = self.folder / ordered[-1].aggregate / upcasting.FILE
        accepts: dict[int, tuple[EventSchema, Upcaster | None]] = {ordered[-1].version: (ordered[-1], None)}
        for place, schema in enumerate(ordered[:-1]):
            upcaster = upcasting.chain(file, ordered[place:])
            if upcaster is None:
                raise Failure(
                    f"{schema.name} does not lead to {ordered[-1].name}: {file} lacks a function",
                    f"write def {upcasting.name_of(schema.type, schema.version)}(payload), or name the versions that "
                    f"the sink takes, such as {schema.name}",
                    code="upcaster-missing",
                )
            accepts[schema.version] = (schema, upcaster)
        return Wanted(event, ordered[-1], accepts)


def of_project(settings: Settings) -> Catalog:
    """The catalog of the project, with the topics that these settings name. Raises Failure as `load` does."""
    folder = project.current().events
    for file in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        if SCHEMA_FILE.fullmatch(file.name):
            raise _unusable(
                file,
                "it declares an event outside of the folder of an aggregate type",
                f"move it to {folder}/AGGREGATE, beside an {AGGREGATE_FILE} (docs/events.md)",
            )
    return load(folder, settings.topic_prefix, settings.topic_partitions)


@cache
def load(folder: Path, topic_prefix: str, partitions: int = 4) -> Catalog:
    """The catalog in a folder; empty if there is no such folder.

    Raises Failure if a file cannot be used, if two files declare one event, if a payload lacks the key or the version,
    or if aggregates share a topic and differ in key, version or partitions.
    """
    found = [
        _aggregate(entry, folder, topic_prefix, partitions)
        for entry in (sorted(folder.iterdir()) if folder.is_dir() else ())
        if _declares(entry)
    ]
    made = Catalog(folder, {aggregate.name: aggregate for aggregate in found})
    for name, twin in _twins(made.aggregates):
        raise _unusable(f"aggregate type {name}", f"{twin} differs in case only", "rename one")
    for topic, aggregates in made.topics.items():
        _require_one_order(topic, aggregates)
    return made


def _declares(entry: Path) -> bool:
    """Whether it is the folder of an aggregate type, and not one that Python or an editor has left there."""
    if entry.name.startswith((".", "__")) or not entry.is_dir():
        return False
    return (entry / AGGREGATE_FILE).exists() or any(entry.glob("*.json"))


def _aggregate(entry: Path, folder: Path, topic_prefix: str, partitions: int) -> Aggregate:
    if not NAME.fullmatch(entry.name):
        raise _unusable(
            entry,
            f"{entry.name} cannot be an aggregate type",
            "begin with a letter; use letters, digits, _ and -; at most 100 characters",
        )
    options = _options(entry / AGGREGATE_FILE)
    is_default = "topic" not in options
    topic = options.pop("topic", f"{topic_prefix}.{entry.name}")
    if not TOPIC.fullmatch(topic):
        of_default = "; it begins with the topic prefix of the project (`topic-prefix`)" if is_default else ""
        remedy = f"letters, digits, '.', _ and -, at most 249{of_default}"
        raise _unusable(entry / AGGREGATE_FILE, f"{topic} cannot be a topic", remedy)
    events = _events(entry, folder, options["key"])
    made = Aggregate(entry.name, topic, **{"partitions": partitions, **options}, events=events)
    if not made.events:
        raise _unusable(entry, "it declares no event", f"name its files {EXAMPLE}")
    for schema in made.schemas:
        _require_schema(schema, made.key, made.version)
    return made


def _events(entry: Path, folder: Path, key: str) -> dict[str, dict[int, EventSchema]]:
    found: dict[str, dict[int, EventSchema]] = {}
    for file in sorted(entry.glob("*.json")):
        named = SCHEMA_FILE.fullmatch(file.name)
        if named is None or not TYPE.fullmatch(named["type"]) or not VERSION.fullmatch(named["version"]):
            raise _unusable(file, "its name declares no event", EXAMPLE)
        type_, version = named["type"], int(named["version"])
        found.setdefault(type_, {})[version] = EventSchema(entry.name, type_, version, bundle(file, folder), key)
    for type_, twin in _twins(found, lambda name: upcasting.name_of(name, version=0).lower()):
        one_event = f"{twin} and {type_} are one event to a file system, to SQL or to {upcasting.FILE}"
        raise _unusable(entry, one_event, "rename one of the two")
    return {type_: dict(sorted(versions.items())) for type_, versions in found.items()}


def _options(file: Path) -> dict[str, Any]:
    try:
        options = tomllib.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:  # tomllib.TOMLDecodeError is a ValueError
        raise _unusable(file, str(error), 'it needs at least the key, such as key = "order_id"') from None
    for name, value in options.items():
        if type(value) is not OPTIONS.get(name) or value == "":
            raise _unusable(file, f"{name} = {value!r}", KNOWN)
    if "key" not in options or options.get("partitions", 1) < 1 or options["key"] == options.get("version"):
        raise _unusable(
            file, "key is required, version is another property, and partitions is at least 1", 'write key = "…"'
        )
    return options


def _require_schema(schema: EventSchema, key: str, version: str | None) -> None:
    """Raises Failure if a payload lacks the key or the version, or if a property cannot be a column."""
    columns = {column.name: column for column in schema.columns}
    uses: list[tuple[str, str | None, set[SqlType]]] = [("key", key, KEY_TYPES), ("version", version, {"bigint"})]
    for use, name, types in uses:
        if name is not None and (name not in columns or columns[name].is_nullable or columns[name].type not in types):
            raise _unusable(
                f"event {schema.name}",
                f"{name} cannot be the {use} of its events",
                f"the {use} is a required property that is never null and becomes {' or '.join(sorted(types))}; an "
                "integer becomes bigint if minimum and maximum keep it within 64 bits",
            )
        if name is not None and has(schema.document, schema.properties[name], PERSONAL):
            problem = f"{name} is personal, and records, memories and reports have it as it is"
            raise _unusable(f"event {schema.name}", problem, "identify entities by random ids, and number their events")
    for problem, remedy in _column_problems(schema.columns):
        raise _unusable(f"event {schema.name}", problem, remedy)


def _require_one_order(topic: str, aggregates: Sequence[Aggregate]) -> None:
    """The events of a key on a topic are in one order, whichever aggregates they are of."""
    if len({(one.key, one.version, one.partitions) for one in aggregates}) > 1:
        raise _unusable(
            f"topic {topic}",
            f"{_names(aggregates)} share it and differ in key, version or partitions",
            "on one topic the events of a key are numbered together; give them the same, or topics of their own",
        )
    types = Counter(type_ for aggregate in aggregates for type_ in aggregate.events)
    for type_ in [type_ for type_, count in types.items() if count > 1]:
        raise _unusable(
            f"topic {topic}",
            f"{_names(aggregates)} have two events called {type_}",
            "a record has the event's type and not its aggregate: rename one, or give them topics of their own",
        )
    schemas = [schema for aggregate in aggregates for schema in aggregate.schemas]
    keys = {column.type for one in schemas for column in one.columns if column.name == aggregates[0].key}
    if len(keys) > 1:
        raise _unusable(
            f"topic {topic}",
            f"the key {aggregates[0].key} is {' and '.join(sorted(keys))}",
            "let it have one type in all events",
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


def _twins(names: Iterable[str], spelled: Callable[[str], str] = str.lower) -> Iterator[tuple[str, str]]:
    """The names that are spelled as another one before them, each with that one."""
    known: dict[str, str] = {}
    for name in names:
        if (twin := known.setdefault(spelled(name), name)) != name:
            yield name, twin


def _names(aggregates: Sequence[Aggregate]) -> str:
    return ", ".join(aggregate.name for aggregate in aggregates)


def row_bytes(columns: Iterable[Column]) -> int:
    """How many bytes of a row the columns take at most, if none of them is NULL."""
    return sum(BYTES.get(column.type, 8) for column in columns)


def _unusable(what: object, problem: str, remedy: str) -> Failure:
    return Failure(f"{what}: {problem}", remedy, code="event-declaration-unusable")
