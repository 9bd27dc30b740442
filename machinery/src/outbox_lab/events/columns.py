"""The columns that the SQL of a sink can read, for `outbox events columns`: of ``new_events``, and of each view."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from outbox.base.settings import Settings
from outbox.events.schema import Column
from outbox.sink import discovery

BARE = re.compile(r"(?!offset\Z)[a-z_][a-z0-9_]*")
PLACE = (Column("event_id", "uuid", False), Column("partition", "bigint", False), Column("offset", "bigint", False))


class Readable(NamedTuple):
    """A column of a table or view. ``column`` is quoted where SQL needs it."""

    table: str
    column: str
    type: str
    nullable: bool


def of_sink(settings: Settings, name: str) -> tuple[list[Readable], str | None]:
    """The columns, the views first; and the sink's transform, whose result ``new_events`` has instead.

    Raises Failure if no sink has the name, or if it cannot run as it is declared.
    """
    specs, failures = discovery.usable(settings, [name])
    if failures:
        raise failures[name]
    layout, transform = specs[0].layout, specs[0].job.transform
    if transform is not None:
        return _readable("(transform)", layout.columns), transform
    found = [column for view, event in layout.views.items() for column in _readable(view, layout.types[event])]
    return found + _readable("new_events", layout.columns), None


def _readable(table: str, columns: Sequence[Column]) -> list[Readable]:
    return [
        Readable(table, one.name if BARE.fullmatch(one.name) else f'"{one.name}"', one.type, one.is_nullable)
        for one in (*PLACE, *columns)
    ]
