"""Properties of events as options name them: ``cents:integer``. Each has a rule of JSON Schema and an example."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects.postgresql.base import RESERVED_WORDS

from outbox.base import project
from outbox.base.errors import Failure
from outbox.events import catalog
from outbox.events.schema import BIGINT_MAX, BIGINT_MIN

NAME = re.compile(r"[a-z_][a-z0-9_]*")
NAMED = "use a-z, 0-9 and _, and begin with a letter"
# Columns that every table of a sink, or every view of the source, has beside those of the events.
OURS = {"sink", "key", "total"}
COMMON = "common.schema.json"
MOMENT = "2026-11-21T10:00:00Z"
ID = "01a1fc75-167d-7239-af57-d1ee1a62e0a6"


class Kind(NamedTuple):
    """A type of properties: its rule, a value for examples, and what an upcaster gives to older events."""

    rule: Mapping[str, Any]
    example: Any
    blank: Any


class Property(NamedTuple):
    """A property of an event."""

    name: str
    rule: Mapping[str, Any]
    example: Any
    blank: Any
    is_required: bool = True


KINDS: Mapping[str, Kind] = {
    "text": Kind({"type": "string"}, "text", ""),
    "uuid": Kind({"type": "string", "format": "uuid"}, ID, "00000000-0000-0000-0000-000000000000"),
    "integer": Kind({"type": "integer", "minimum": BIGINT_MIN, "maximum": BIGINT_MAX}, 1, 0),
    "number": Kind({"type": "number"}, 1.5, 0),
    "boolean": Kind({"type": "boolean"}, True, False),
    "timestamp": Kind({"type": "string", "format": "date-time"}, MOMENT, "1970-01-01T00:00:00Z"),
    "date": Kind({"type": "string", "format": "date"}, MOMENT[:10], "1970-01-01"),
    "array": Kind({"type": "array"}, [], []),
    "object": Kind({"type": "object"}, {}, {}),
}
NUMBER_OF_KEY = Kind({"type": "integer", "minimum": 1, "maximum": BIGINT_MAX}, 1, 0)
quoted = postgresql.dialect().identifier_preparer.quote  # type: ignore[no-untyped-call]


def read(text: str, default: str | None = None, *, is_required: bool = True) -> Property:
    """The property that ``name:type`` declares. Raises Failure if no table can have it, or if the type is unknown."""
    name, _, kind = text.partition(":")
    require_column(name)
    if not (kind or default):
        raise unusable(f"property {name!r}", "it has no type", f"write {name}:TYPE; types are {', '.join(KINDS)}")
    found = _kind(kind or str(default))
    return Property(name, found.rule, found.example, found.blank, is_required)


def require_column(name: str) -> None:
    """Raises Failure unless a table of the service and of a sink can have a column of this name."""
    if name in OURS or name in catalog.RESERVED or catalog.name_problem(name) is not None:
        raise unusable(f"property {name!r}", "it is a column of ours or of Postgres", "choose another name")
    require_word(f"property {name!r}", name)


def require_word(what: str, name: str) -> None:
    """Raises Failure unless SQL takes a name without quotes."""
    if not NAME.fullmatch(name) or len(name) > catalog.NAME_MAX_BYTES:
        raise unusable(what, "it is no name in SQL", f"{NAMED}; at most {catalog.NAME_MAX_BYTES} characters")
    if name in RESERVED_WORDS:
        raise unusable(what, "it is a keyword of SQL", "choose another name")


def require_distinct(properties: Sequence[Property]) -> None:
    """Raises Failure if two properties have one name."""
    names = [one.name for one in properties]
    for name in names:
        if names.count(name) > 1:
            raise unusable(f"property {name}", "it is given twice, or every event of the key has it", "name it once")


def unusable(what: str, problem: str, remedy: str) -> Failure:
    """The failure of a name that nothing can have."""
    return Failure(f"{what}: {problem}", remedy, code="name-unusable")


def documents(folder: Path) -> Iterator[dict[str, Any]]:
    """The schema files below a folder, as they are written."""
    for file in sorted(folder.glob("*/*.schema.json")):
        yield json.loads(file.read_text("utf-8"))


def _kind(name: str) -> Kind:
    """The type of a name: a definition of the project, or else one of ours."""
    shared = project.current().events / COMMON
    defined = json.loads(shared.read_text("utf-8")).get("$defs", {}) if shared.exists() else {}
    if name in defined:
        reference = {"$ref": f"../{COMMON}#/$defs/{name}"}
        example = next(_examples_of(reference, defined[name]), None)
        if example is not None:
            return Kind(reference, example, example)
        raise unusable(f"type {name}", f"no event has an example of it, nor has {shared}", "give it `examples` there")
    if name not in KINDS:
        of_project = f", or a definition in {shared.name}: {', '.join(defined)}" if defined else ""
        raise unusable(f"type {name!r}", "there is no such type", f"use {', '.join(KINDS)}{of_project}")
    return KINDS[name]


def _examples_of(reference: Mapping[str, Any], definition: Mapping[str, Any]) -> Iterator[Any]:
    """Values of a definition: its own examples, then those of events that refer to it."""
    yield from definition.get("examples", ())
    for document in documents(project.current().events):
        for name, rule in document.get("properties", {}).items():
            if isinstance(rule, dict) and rule.get("$ref") == reference["$ref"]:
                yield from (one[name] for one in document.get("examples", ()) if name in one)
