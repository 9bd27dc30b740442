"""Properties of events as options name them: ``cents:integer``, ``email:text:personal``, ``room:text=unassigned``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from uuid import NAMESPACE_OID, UUID, uuid5
from zlib import crc32

from outbox.base.errors import Failure
from outbox.events import catalog
from outbox.events.schema import BIGINT_MAX, BIGINT_MIN, PERSONAL, PayloadSchema

NAME = re.compile(rf"[a-z_][a-z0-9_]{{0,{catalog.NAME_MAX_BYTES - 1}}}")
# Columns that a sink's table, or a view of the source, has beside those of the events.
OURS = {"sink", "key", "total", *catalog.RESERVED}
FIRST_DAY = datetime(2026, 1, 1, 9, tzinfo=UTC)
BIGINT = {"type": "integer", "minimum": BIGINT_MIN, "maximum": BIGINT_MAX}
# By name: the rule of JSON Schema, an example from a text and a time, and what an upcaster gives to older events.
TYPES: Mapping[str, tuple[Mapping[str, Any], Callable[[str, datetime], Any], Any]] = {
    "text": ({"type": "string"}, lambda text, _: text, ""),
    "uuid": ({"type": "string", "format": "uuid"}, lambda text, _: str(uuid5(NAMESPACE_OID, text)), str(UUID(int=0))),
    "integer": (BIGINT, lambda text, _: crc32(text.encode()) % 900 + 100, 0),
    "number": ({"type": "number"}, lambda text, _: crc32(text.encode()) % 900 + 0.5, 0),
    "boolean": ({"type": "boolean"}, lambda text, _: len(text) % 2 == 0, False),
    "timestamp": ({"type": "string", "format": "date-time"}, lambda _, at: at.isoformat(), "1970-01-01T00:00:00Z"),
    "date": ({"type": "string", "format": "date"}, lambda _, at: at.date().isoformat(), "1970-01-01"),
    "array": ({"type": "array"}, lambda text, _: [text], []),
    "object": ({"type": "object"}, lambda text, _: {"text": text}, {}),
}


class Property(NamedTuple):
    """A property of an event."""

    name: str
    rule: Mapping[str, Any]
    example: Any  # a value, or what makes it of a text and a time
    blank: Any = None
    is_required: bool = True
    has_blank: str = ""  # not empty if an option gives it

    def example_of(self, event: str, number: int) -> Any:
        """A value that differs from those of other properties, and of other events by their name or number."""
        moment = FIRST_DAY + timedelta(days=number, seconds=crc32(self.name.encode()) % 10**7)
        return self.example(f"{self.name} of {event}", moment) if callable(self.example) else self.example


def read(text: str, default: str = "", *, is_required: bool = True, may_have_blank: bool = False) -> Property:
    """The property that ``name:type`` declares. Raises Failure if no table can have it, or if the type is unknown."""
    name, _, rest = text.partition(":")
    declared, has_blank, blank = rest.partition("=") if may_have_blank else (rest, "", "")
    type_, _, annotation = declared.partition(":")
    require_word("property", name)
    if name in OURS or catalog.name_problem(name) is not None:
        raise unusable(f"property {name!r}", "it is a column of ours or of Postgres", "choose another name")
    if (type_ or default) not in TYPES or annotation not in {"", "personal"}:
        remedy = f"write {name}:TYPE or {name}:TYPE:personal, one of {', '.join(TYPES)}"
        remedy += "; only --property of a new version takes =VALUE" if "=" in declared else ""
        raise unusable(f"property {name!r}", f"{declared!r} is no type", remedy)
    rule, example, usual = TYPES[type_ or default]
    chosen = _value(name, rule, blank) if has_blank else usual
    return Property(name, {**rule, **({PERSONAL: True} if annotation else {})}, example, chosen, is_required, has_blank)


def version(name: str) -> Property:
    """The property that numbers the events of a key."""
    return read(f"{name}:integer")._replace(rule={**BIGINT, "minimum": 1}, example=1)


def require_word(what: str, name: str) -> None:
    """Raises Failure unless SQL takes the name of a property or a table without quotes."""
    from sqlalchemy.dialects.postgresql.base import RESERVED_WORDS  # it takes longer to import than help to print

    if not NAME.fullmatch(name) or name in RESERVED_WORDS:
        problem = "it is a keyword of SQL" if name in RESERVED_WORDS else "it is no name in SQL"
        remedy = f"use a-z, 0-9 and _, at most {catalog.NAME_MAX_BYTES}, and no keyword"
        raise unusable(
            f"{what} {name!r}", problem, f"give another name by --table; {remedy}" if what == "table" else remedy
        )


def _value(name: str, rule: Mapping[str, Any], text: str) -> Any:
    """The value of a property that an option gives. Raises Failure if it violates the property's rule."""
    value = text
    with suppress(ValueError):
        value = text if rule["type"] == "string" else json.loads(text)
    if violation := PayloadSchema(name, {"properties": {name: rule}}).violation({name: value}):
        raise unusable(f"property {name!r}", f"{violation.detail}", "write a value of its type after =")
    return value


def unusable(what: str, problem: str, remedy: str) -> Failure:
    """The failure of a name that nothing can have."""
    return Failure(f"{what}: {problem}", remedy, code="name-unusable")
