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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outbox.base import project
from outbox.base.errors import Failure
from outbox.events import upcasting, usable
from outbox.events.aggregate import Aggregate
from outbox.events.references import bundle
from outbox.events.schema import EventSchema
from outbox.events.upcasting import Upcaster

if TYPE_CHECKING:
    from outbox.base.settings import Settings  # `append` works without pydantic

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
        """One version of an event. Raises Failure `event-undeclared` if it is not declared."""
        known = self.aggregates.get(aggregate)
        found = known.events.get(type_, {}).get(version) if known is not None else None
        if found is None:
            raise Failure(
                f"event {aggregate}.{type_}.v{version} is not declared",
                f"declare it in {self.file(aggregate, type_, version)}; `outbox events` lists what is declared",
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
            raise Failure(
                f"there is no event {name}",
                f"there are {', '.join(self._names()) or 'none'} (`outbox events`)",
                code="event-undeclared",
            )
        return found

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

    def file(self, aggregate: str, type_: str, version: int) -> Path:
        """The file that declares one version of an event, or would."""
        return self.folder / aggregate / f"{type_}.v{version}.schema.json"


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
    usable.require_own_names(list(made.aggregates))
    usable.require_topics(made.topics, topic_prefix)
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
        usable.require_schema(schema, made.key, made.version)
    return made


def _events(entry: Path, folder: Path, key: str) -> dict[str, dict[int, EventSchema]]:
    found: dict[str, dict[int, EventSchema]] = {}
    spelled: dict[str, str] = {}
    for file in sorted(entry.glob("*.json")):
        type_, version = _declared_by(file)
        twin = spelled.setdefault(upcasting.name_of(type_, version=0).lower(), type_)
        if twin != type_:
            raise _unusable(
                file,
                f"{twin} and {type_} are one event to a file system, to SQL or to {upcasting.FILE}",
                "rename one of the two",
                code="event-declared-twice",
            )
        found.setdefault(type_, {})[version] = EventSchema(entry.name, type_, version, bundle(file, folder), key)
    return {type_: dict(sorted(versions.items())) for type_, versions in found.items()}


def _declared_by(file: Path) -> tuple[str, int]:
    named = SCHEMA_FILE.fullmatch(file.name)
    if named is None or not TYPE.fullmatch(named["type"]) or not VERSION.fullmatch(named["version"]):
        raise _unusable(file, "its name declares no event", EXAMPLE)
    return named["type"], int(named["version"])


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


def _unusable(file: Path, problem: str, remedy: str, code: str = "event-declaration-unusable") -> Failure:
    return Failure(f"{file}: {problem}", remedy, code=code)
