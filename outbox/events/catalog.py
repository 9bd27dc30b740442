"""The catalog of a project's events: what each folder of connect/events declares.

    connect/events/account/aggregate.toml            key, version, topic, partitions, source
    connect/events/account/opened.v1.schema.json     the payload of event type `opened`, version 1
    connect/events/account/upcast.py                 from older versions to newer ones (outbox/events/upcasting.py)
    connect/events/common.schema.json                what the others share by `$ref`

An event is called ``account.opened``, one version of it ``account.opened.v1``. `append`, topics, routing, decoding, `check`
and retention all ask here.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from outbox.base import project
from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.events import upcasting
from outbox.events.references import bundle
from outbox.events.schema import EventSchema, SqlType
from outbox.events.upcasting import Upcaster

AGGREGATE_FILE = "aggregate.toml"
TYPE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
VERSION = re.compile(r"[1-9][0-9]{0,3}")
SCHEMA_FILE = re.compile(rf"(?P<type>{TYPE.pattern})\.v(?P<version>{VERSION.pattern})\.schema\.json")
SCHEMAS = "*.schema.json"
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,99}")
TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")  # as Kafka has it
MARKERS = "outbox_markers"  # the aggregate type of what `outbox prune` sends through the relay; nobody reads it
KEY_TYPES: set[SqlType] = {"uuid", "text", "bigint"}  # of which a record's key is the text
RESERVED = {"event_id", "event_type", "partition", "offset"}  # columns of every batch


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
    def topics(self) -> dict[str, list[Aggregate]]:
        """The aggregates by topic."""
        found: dict[str, list[Aggregate]] = {}
        for aggregate in self.aggregates.values():
            found.setdefault(aggregate.topic, []).append(aggregate)
        return found

    def schema(self, aggregate: str, type_: str, version: int) -> EventSchema:
        """One version of an event. Raises Failure `event-undeclared` if there is none."""
        known = self.aggregates.get(aggregate)
        found = known.events.get(type_, {}).get(version) if known is not None else None
        if found is None:
            raise Failure(
                f"event {aggregate}.{type_}.v{version} is not declared",
                self._declare(aggregate, type_, version),
                code="event-undeclared",
            )
        return found

    def wanted(self, names: Sequence[str]) -> list[Wanted]:
        """The events of these names: an aggregate type, an event, or one version of an event; each once.

        An event stands for all its versions, each of which must lead to the newest by upcasters. Raises Failure if a
        name is not declared, or if an upcaster is missing.
        """
        found: dict[str, Wanted] = {}
        for name in names:
            for one in self._wanted(name):
                found.setdefault(one.name, one)
        return list(found.values())

    def _wanted(self, name: str) -> Iterator[Wanted]:
        for aggregate in self.aggregates.values():
            for type_, versions in aggregate.events.items():
                event = f"{aggregate.name}.{type_}"
                if name in (aggregate.name, event):
                    yield replace(self._newest(event, versions), by_aggregate=name == aggregate.name)
                for version, schema in versions.items():
                    if name == f"{event}.v{version}":
                        yield Wanted(name, schema, {version: (schema, None)})
        if name not in self._names():
            raise Failure(
                f"there is no event {name}",
                f"there are {', '.join(self._names()) or 'none'} (`outbox events`)",
                code="event-undeclared",
            )

    def _names(self) -> list[str]:
        names: dict[str, None] = {}
        for aggregate in self.aggregates.values():
            names[aggregate.name] = None
            for schema in aggregate.schemas:
                names[schema.event] = None
                names[schema.name] = None
        return list(names)

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

    def _declare(self, aggregate: str, type_: str, version: int) -> str:
        file = self.folder / aggregate / f"{type_}.v{version}.schema.json"
        return f"declare it in {file}; `outbox events` lists what is declared"


def of(settings: Settings) -> Catalog:
    """The catalog of the project, with the topics that these settings name. Raises Failure as `load` does."""
    return load(project.current().events, settings.topic_prefix, settings.topic_partitions)


@cache
def load(folder: Path, topic_prefix: str, partitions: int = 4) -> Catalog:
    """The catalog in a folder; empty if there is no such folder.

    Raises Failure if a file cannot be used, if two files declare one event, if a payload lacks the key or the version,
    or if aggregates share a topic and differ in key, version or partitions.
    """
    found = [
        _aggregate(entry, folder, topic_prefix, partitions)
        for entry in (sorted(folder.iterdir()) if folder.is_dir() else ())
        if entry.is_dir() and any(entry.glob("*.json"))
    ]
    made = Catalog(folder, {aggregate.name: aggregate for aggregate in found})
    for topic, aggregates in made.topics.items():
        _require_one_order(topic, aggregates)
    return made


def _aggregate(entry: Path, folder: Path, topic_prefix: str, partitions: int) -> Aggregate:
    if not NAME.fullmatch(entry.name) or entry.name == MARKERS:
        raise _unusable(
            entry, f"{entry.name} cannot be an aggregate type", "letters, digits, _ and -, not a digit first"
        )
    options = _options(entry / AGGREGATE_FILE)
    topic = options.pop("topic", f"{topic_prefix}.{entry.name}")
    if not TOPIC.fullmatch(topic):
        raise _unusable(entry / AGGREGATE_FILE, f"{topic} cannot be a topic", "letters, digits, '.', _ and -")
    made = Aggregate(entry.name, topic, **{"partitions": partitions, **options}, events=_events(entry, folder))
    if not made.events:
        raise _unusable(
            entry, "it declares no event", "name its files TYPE.vN.schema.json, such as opened.v1.schema.json"
        )
    for schema in made.schemas:
        _require_usable(schema, made)
    return made


def _events(entry: Path, folder: Path) -> dict[str, dict[int, EventSchema]]:
    found: dict[str, dict[int, EventSchema]] = {}
    spelled: dict[tuple[str, int], str] = {}
    for file in sorted(entry.glob("*.json")):
        named = SCHEMA_FILE.fullmatch(file.name)
        if named is None:
            raise _unusable(file, "its name declares no event", "TYPE.vN.schema.json, such as opened.v1.schema.json")
        type_, version = named["type"], int(named["version"])
        twin = spelled.setdefault((type_.lower(), version), file.name)
        if twin != file.name:
            raise _unusable(
                file, f"{twin} declares the same event", "remove one of the two", code="event-declared-twice"
            )
        schema = EventSchema(entry.name, type_, version, bundle(file, folder))
        found.setdefault(type_, {})[version] = schema
    return {type_: dict(sorted(versions.items())) for type_, versions in found.items()}


def _options(file: Path) -> dict[str, Any]:
    try:
        options = tomllib.loads(file.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise _unusable(file, str(error), 'it needs at least the key, such as key = "account_id"') from None
    types: dict[str, type] = {"key": str, "version": str, "topic": str, "source": str, "partitions": int}
    for name, value in options.items():
        if type(value) is not types.get(name):
            raise _unusable(file, f"{name} = {value!r}", "known are key, version, topic, source (texts) and partitions")
    if "key" not in options or options.get("partitions", 1) < 1:
        raise _unusable(file, "key is required, and partitions is at least 1", 'write key = "…"')
    return options


def _require_usable(schema: EventSchema, aggregate: Aggregate) -> None:
    columns = {column.name: column for column in schema.columns}
    uses: list[tuple[str, str | None, set[SqlType]]] = [
        ("key", aggregate.key, KEY_TYPES),
        ("version", aggregate.version, {"bigint"}),
    ]
    for use, name, types in uses:
        if name is not None and (name not in columns or columns[name].is_nullable or columns[name].type not in types):
            raise Failure(
                f"event {schema.name}: {name} cannot be the {use} of its events",
                f"the {use} is a required property that is never null and becomes {' or '.join(sorted(types))}; an "
                "integer becomes bigint if minimum and maximum keep it within 64 bits",
                code="event-declaration-unusable",
            )
    reserved = sorted(RESERVED & columns.keys())
    if reserved:
        raise Failure(
            f"event {schema.name}: {', '.join(reserved)} is a column of every batch",
            "give the property another name",
            code="event-declaration-unusable",
        )


def _require_one_order(topic: str, aggregates: Sequence[Aggregate]) -> None:
    """The events of a key on a topic are in one order, whichever aggregates they are of."""
    names = ", ".join(aggregate.name for aggregate in aggregates)
    if len({(one.key, one.version, one.partitions) for one in aggregates}) > 1:
        raise Failure(
            f"aggregates {names} share topic {topic} and differ in key, version or partitions",
            "on one topic the events of a key are numbered together; give them the same, or topics of their own",
            code="topic-shared-wrongly",
        )
    if aggregates and f".{MARKERS}" == topic[-len(MARKERS) - 1 :]:
        raise Failure(f"topic {topic} is that of the markers", "choose another name", code="topic-shared-wrongly")
    owners: dict[str, str] = {}
    for aggregate in aggregates:
        for type_ in aggregate.events:
            if owners.setdefault(type_, aggregate.name) != aggregate.name:
                raise Failure(
                    f"topic {topic} has two events called {type_}, of {owners[type_]} and of {aggregate.name}",
                    "a record has the event's type and not its aggregate: rename one, or give them topics of their own",
                    code="event-declared-twice",
                )
    types = {
        column.type
        for one in aggregates
        for schema in one.schemas
        for column in schema.columns
        if column.name == one.key
    }
    if len(types) > 1:
        raise Failure(
            f"the key {aggregates[0].key} of the events on topic {topic} is {' and '.join(sorted(types))}",
            "let it have one type in all of them",
            code="event-declaration-unusable",
        )


def _unusable(file: Path, problem: str, remedy: str, code: str = "event-declaration-unusable") -> Failure:
    return Failure(f"{file}: {problem}", remedy, code=code)
