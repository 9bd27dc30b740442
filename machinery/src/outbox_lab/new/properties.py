"""Properties of events as options name them: ``cents:integer``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from outbox.base.errors import Failure
from outbox.events import catalog
from outbox.events.schema import BIGINT_MAX, BIGINT_MIN

NAME = re.compile(rf"[a-z_][a-z0-9_]{{0,{catalog.NAME_MAX_BYTES - 1}}}")
# Columns that a sink's table, or a view of the source, has beside those of the events.
OURS = {"sink", "key", "total", *catalog.RESERVED}
ID = "01a1fc75-167d-7239-af57-d1ee1a62e0a6"
MOMENT = "2026-11-21T10:00:00Z"
# By name: the rule of JSON Schema, a value for examples, and what an upcaster gives to older events.
TYPES: Mapping[str, tuple[Mapping[str, Any], Any, Any]] = {
    "text": ({"type": "string"}, "text", ""),
    "uuid": ({"type": "string", "format": "uuid"}, ID, "00000000-0000-0000-0000-000000000000"),
    "integer": ({"type": "integer", "minimum": BIGINT_MIN, "maximum": BIGINT_MAX}, 1, 0),
    "number": ({"type": "number"}, 1.5, 0),
    "boolean": ({"type": "boolean"}, True, False),
    "timestamp": ({"type": "string", "format": "date-time"}, MOMENT, "1970-01-01T00:00:00Z"),
    "date": ({"type": "string", "format": "date"}, MOMENT[:10], "1970-01-01"),
    "array": ({"type": "array"}, [], []),
    "object": ({"type": "object"}, {}, {}),
}


class Property(NamedTuple):
    """A property of an event."""

    name: str
    rule: Mapping[str, Any]
    example: Any
    blank: Any = None
    is_required: bool = True


def read(text: str, default: str = "", *, is_required: bool = True) -> Property:
    """The property that ``name:type`` declares. Raises Failure if no table can have it, or if the type is unknown."""
    name, _, type_ = text.partition(":")
    require_word(f"property {name!r}", name)
    if name in OURS or catalog.name_problem(name) is not None:
        raise unusable(f"property {name!r}", "it is a column of ours or of Postgres", "choose another name")
    if (type_ or default) not in TYPES:
        raise unusable(f"property {name!r}", f"{type_!r} is no type", f"write {name}:TYPE, one of {', '.join(TYPES)}")
    return Property(name, *TYPES[type_ or default], is_required)


def version(name: str) -> Property:
    """The property that numbers the events of a key."""
    return read(f"{name}:integer")._replace(rule={"type": "integer", "minimum": 1, "maximum": BIGINT_MAX})


def require_word(what: str, name: str) -> None:
    """Raises Failure unless SQL takes a name without quotes."""
    from sqlalchemy.dialects.postgresql.base import RESERVED_WORDS  # it takes longer to import than help to print

    if not NAME.fullmatch(name) or name in RESERVED_WORDS:
        problem = "it is a keyword of SQL" if name in RESERVED_WORDS else "it is no name in SQL"
        raise unusable(what, problem, f"use a-z, 0-9 and _, at most {catalog.NAME_MAX_BYTES}, and no keyword")


def unusable(what: str, problem: str, remedy: str) -> Failure:
    """The failure of a name that nothing can have."""
    return Failure(f"{what}: {problem}", remedy, code="name-unusable")
