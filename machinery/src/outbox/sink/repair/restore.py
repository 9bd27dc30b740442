"""The event that a dead letter holds, as the sink takes it today.

A letter of an invalid record has the record, which is validated by today's contract. A letter of a valid event has the
columns of that time. Since then the sink may take other events, and the event a newer version.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from outbox.events.schema import Column, Rejection
from outbox.events.values import decode
from outbox.sink import dead_letters
from outbox.sink.decoder import UNKNOWN_TYPE, UNKNOWN_VERSION, DecodedEvent, RecordDecoder, Skipped
from outbox.sink.layout import EVENT_TYPE, PLACE, Layout
from outbox.sink.records import Record


class Letter(NamedTuple):
    """What is kept of an open letter."""

    identity: str
    key: memoryview | None
    headers: list[dict[str, Any]] | None
    value: memoryview | None
    event: str | None  # the columns of a valid event, as JSON
    event_type: str | None  # of a valid event; None in letters of earlier versions
    schema_version: int | None
    event_id: str | None
    partition: int
    offset: int
    recorded_ms: int


def is_current(letter: Letter, decoder: RecordDecoder, layout: Layout) -> bool:
    """Whether the letter has an event in just the columns that the sink's tables have today."""
    if letter.event is None or letter.event_type not in decoder.types:
        return False
    columns = {*PLACE, *(column.name for column in layout.columns)}
    is_same_version = letter.schema_version == decoder.schema_versions.get(str(letter.event_type))
    return is_same_version and decode(letter.event.encode()).keys() == columns


def event_of(letter: Letter, decoder: RecordDecoder) -> DecodedEvent | Rejection | Skipped:
    """The event, or why it is still rejected, or that the sink does not ask for it."""
    found = decoder.bounded(_validated(letter, decoder) if letter.event is None else _restored(letter, decoder))
    if isinstance(found, DecodedEvent) and found.event_id != letter.identity:
        # Its event would not find the letter, and so not close it.
        return Rejection("malformed id", "the dead letter's identity is not the id of its event")
    return found


def _validated(letter: Letter, decoder: RecordDecoder) -> DecodedEvent | Rejection | Skipped:
    headers = dead_letters.headers(letter.headers or ())
    return decoder.record(Record(_bytes(letter.key), headers, _bytes(letter.value), letter.recorded_ms))


def _restored(letter: Letter, decoder: RecordDecoder) -> DecodedEvent | Rejection | Skipped:
    stored = decode(str(letter.event).encode())
    if letter.event_type is not None:
        return _restored_as(letter.event_type, letter.schema_version, letter, stored, decoder)
    found = [_restored_as(name, version, letter, stored, decoder) for name, version in _guesses(stored, decoder)]
    found.append(Rejection(UNKNOWN_TYPE, "the dead letter names no event, and its columns fit none"))
    return next((one for one in found if isinstance(one, DecodedEvent)), found[0])


def _restored_as(
    name: str, version: int | None, letter: Letter, stored: Mapping[str, Any], decoder: RecordDecoder
) -> DecodedEvent | Rejection | Skipped:
    if name not in decoder.types:
        return Skipped(name)
    version = version or decoder.schema_versions.get(name)
    columns = decoder.taken.get((name, version))
    if columns is None:
        return Rejection(UNKNOWN_VERSION, f"version {version} of {name} is no longer declared")
    return decoder.restore(name, version, letter.identity, _payload(stored, columns))


def _guesses(stored: Mapping[str, Any], decoder: RecordDecoder) -> list[tuple[str, int | None]]:
    """The events, with their versions, that it may be: those whose columns it has, with the fewest others.

    Letters of earlier versions do not say which event they have. An event that the sink does not ask for must have just
    these columns, because the letter will be closed. Of several versions the oldest is first: the letter is from before
    the others.
    """
    named = stored.get(EVENT_TYPE)
    if named is not None:
        return [(str(named), None)]
    given = {name for name, value in stored.items() if value is not None and name not in PLACE}
    lacking: dict[tuple[str, int | None], int] = {}
    for event, columns in _known(decoder):
        others = given - {name for column in columns for name in _places(column)}
        is_complete = all(column.is_nullable or _stored(stored, column) is not None for column in columns)
        if is_complete and (event[0] in decoder.types or not others):
            lacking[event] = len(others)
    return [event for event, count in lacking.items() if count == min(lacking.values())]


def _known(decoder: RecordDecoder) -> Iterator[tuple[tuple[str, int | None], Sequence[Column]]]:
    """The columns of each version that the sink takes, the oldest first, and then of the events that it passes."""
    yield from sorted(decoder.taken.items(), key=lambda one: one[0][1] or 0)
    yield from (((name, None), columns) for name, columns in decoder.declared.items() if name not in decoder.types)


def _payload(stored: Mapping[str, Any], columns: Sequence[Column]) -> dict[str, Any]:
    """The payload that has become these columns, with null for what was null or absent."""
    found: dict[str, Any] = {}
    for column in columns:
        value = _stored(stored, column)
        if value is not None and column.type == "timestamptz":
            value = datetime.fromisoformat(value).astimezone(UTC).replace(tzinfo=None).isoformat() + "Z"
        found[column.name] = value
    return found


def _stored(stored: Mapping[str, Any], column: Column) -> Any:
    return next((stored[place] for place in _places(column) if place in stored), None)


def _places(column: Column) -> tuple[str, str]:
    """Where the tables of a sink have the column: see `outbox.sink.layout`."""
    return column.name, f"{column.name}:{column.type}"


def _bytes(content: memoryview | None) -> bytes | None:
    return None if content is None else bytes(content)
