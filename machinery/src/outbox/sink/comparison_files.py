"""The comparisons of a sink: SQL files in a folder ``comparisons`` beside its projections, of totals or of rows.

    -- adds: quantity
    -- [source]
    SELECT key, total FROM source_totals
    -- [sink]
    SELECT sink, key, total, version FROM sink_totals

``[source]`` is run in the source database and ``[sink]`` in the sink database, each by the auditor. The sink's total of
each key must be the source's, less the events that the sink has not applied. ``-- adds:`` says what an event adds to
the total of its key: a property, or 1 for a count; with a minus sign, what it takes away. ``of`` and names limit a line
to events or aggregate types, and there may be several lines. Events that no line is about add nothing. Without such a
line the totals are compared only while the sink has applied every event.

``version`` is optional: the highest version of the key that the sink has applied. It is used if all events that the
comparison is about are on one topic. A sink that carries states needs ``version`` in both queries.

The file of a sink whose result is not in the sink database has no ``[sink]``, because the target says the totals.

Without a column ``total`` in ``[source]``, rows are compared: each column of each key (`outbox.sink.rows`).

    -- table: order_states (order_id)
    -- [source]
    SELECT key, status, cents, version FROM source_orders

A line ``-- table:`` then stands for ``[sink]``: it names the projection's table and its column of keys. The other
columns have the names that the query returns (`outbox.audit.rows.described`). `outbox.sink.repair.rebuild` sets such a
table to the source.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from outbox.base.sections import sql_sections
from outbox.events.schema import EventSchema
from outbox.sink.rows import unusable
from outbox.sink.spec import SinkSpec

FOLDER = "comparisons"
TABLE_LINE = re.compile(r"^--[ \t]*table\b(.*)$", re.MULTILINE | re.IGNORECASE)
TABLE = re.compile(r"[ \t]*:[ \t]*(\w+)[ \t]*\([ \t]*(\w+)[ \t]*\)[ \t]*")
ADDS_LINE = re.compile(r"^--[ \t]*adds\b(.*)$", re.MULTILINE | re.IGNORECASE)
ADDS = re.compile(r":\s*(?P<sign>-?)(?P<what>[^\s,-][^\s,]*)(\s+of\s+(?P<names>[^\s,]+(\s*,\s*[^\s,]+)*))?\s*")
NUMBERS = {"bigint", "numeric"}


class StateTable(NamedTuple):
    """A projection's table that has the state of each key, and its column of keys."""

    name: str
    key: str

    def query(self, columns: Iterable[str]) -> str:
        """The query of its rows, with these columns."""
        selected = "".join(f', "{column}"' for column in columns)
        return f'SELECT sink, "{self.key}" AS key{selected} FROM public."{self.name}"'  # noqa: S608


@dataclass(frozen=True)
class AddsLine:
    """A line ``adds``: the property, or None for a count, and the events; all if there are no names."""

    sign: int
    property: str | None
    names: frozenset[str] = frozenset()

    def is_about(self, schema: EventSchema) -> bool:
        """Whether events of this version add something by this line."""
        return not self.names or not self.names.isdisjoint((schema.aggregate, schema.event, schema.name))


@dataclass(frozen=True)
class Comparison:
    """One comparison. ``sink`` is None if the sink's target says the totals, or if ``table`` stands for the query."""

    file: Path
    adds: Sequence[AddsLine]
    source: str
    sink: str | None = None
    table: StateTable | None = None
    columns: Sequence[str] = ()
    """Of rows, the columns that are compared; none if totals are compared."""
    number: int = 0
    """Its number among the comparisons of a check."""

    @property
    def id(self) -> str:
        """The name of the comparison among all: sinks that share it have it once."""
        return str(self.file)

    @property
    def name(self) -> str:
        """How it is called in a report."""
        return self.file.stem

    def adds_of(self, schema: EventSchema) -> AddsLine | None:
        """The addend of events of a version; None if they add nothing."""
        return next((one for one in self.adds if one.is_about(schema)), None)


def folder_of(spec: SinkSpec) -> Path:
    """Where the comparisons of a sink are."""
    return spec.job.projections.parent / FOLDER


def load(spec: SinkSpec) -> list[Comparison]:
    """The comparisons of a sink; none if it has no folder of them.

    Raises Failure if a file cannot be used.
    """
    return [_read(file, spec) for file in sorted(folder_of(spec).glob("*.sql"))]


def _read(file: Path, spec: SinkSpec) -> Comparison:
    sections = {name: text.strip().rstrip(";") for name, text in sql_sections(file, "source", "sink").items()}
    found = Comparison(file, tuple(_adds(file)), sections["source"], sections.get("sink") or None, _table(file))
    if found.sink is not None and found.table is not None:
        raise unusable(file, "it has a line `-- table:` and a section `-- [sink]`", "keep one of the two")
    _require_adds(found, spec)
    return found


def _table(file: Path) -> StateTable | None:
    text = ", ".join(TABLE_LINE.findall(file.read_text()))
    found = TABLE.fullmatch(text.rstrip())
    if text and not found:
        raise unusable(file, f"`-- table{text}` cannot be read", "write one line `-- table: NAME (KEY_COLUMN)`")
    return StateTable(*found.groups()) if found else None


def _adds(file: Path) -> Iterable[AddsLine]:
    for text in ADDS_LINE.findall(file.read_text()):
        line = ADDS.fullmatch(text.rstrip())
        if line is None:
            raise unusable(
                file, f"`-- adds{text}` cannot be read", "write `-- adds: quantity`, or `-- adds: 1 of order.placed`"
            )
        names = frozenset(name.strip() for name in (line["names"] or "").split(",") if name.strip())
        yield AddsLine(-1 if line["sign"] else 1, None if line["what"] == "1" else line["what"], names)


def _require_adds(comparison: Comparison, spec: SinkSpec) -> None:
    """Each line must be about events of the sink, and its property must be a number of each of them."""
    if spec.job.carries == "states" and comparison.adds:
        raise unusable(comparison.file, "it has a line `adds`, and states add nothing", "delete the line")
    known = {event: columns for decoder in spec.decoders.values() for event, columns in decoder.types.items()}
    owners: dict[str, AddsLine] = {}
    for adds in comparison.adds:
        unknown = [name for name in sorted(adds.names) if not any(_is_named(event, name) for event in known)]
        if unknown:
            raise unusable(
                comparison.file,
                f"sink {spec.name} has no event {', '.join(unknown)}",
                f"it has {', '.join(known)}",
            )
        for event, columns in known.items():
            if adds.names and not any(_is_named(event, name) for name in adds.names):
                continue
            if owners.setdefault(event, adds) is not adds:
                raise unusable(comparison.file, f"two lines `adds` are about {event}", "let one say what it adds")
            types = {column.name: column.type for column in columns}
            if adds.property is not None and types.get(adds.property) not in NUMBERS:
                found = f"is {types[adds.property]}" if adds.property in types else "is no property"
                raise unusable(
                    comparison.file,
                    f"adds: {adds.property} {found} of {event}, and not a number",
                    "name a property that becomes bigint or numeric, or limit the line by `of` to events that have it",
                )


def _is_named(event: str, name: str) -> bool:
    """Whether a name stands for an event that a sink has asked for: itself, its versions, or its aggregate type."""
    return event == name or event.startswith(f"{name}.") or name.startswith(f"{event}.v")
