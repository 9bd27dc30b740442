"""An event as a service writes it, and the row that `append` inserts: checked, with the payload as JSON text.

The text is decoded as a sink decodes it, and that is validated. The same text is inserted, so the outbox holds what was
validated, with all digits of its numbers, whatever a driver or Python's own `json` would make of the payload.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, ClassVar, Protocol

from outbox.base import project, spans
from outbox.base.errors import Failure
from outbox.events import catalog
from outbox.events.catalog import Catalog
from outbox.events.schema import EventSchema, SqlType, shortened
from outbox.events.values import ESCAPED_NUL, KEY_MAX_BYTES, NOT_ENCODABLE, convert, encode, misfit, parse_json

IDLE = 0  # libpq's PQTRANS_IDLE: no transaction is open


class Payload(Protocol):
    """A typed payload, of a class that `outbox events types` has generated."""

    __event__: ClassVar[tuple[str, str, int, str]]  # aggregate type, type, version, and the attribute with the key


@dataclass(frozen=True)
class Event:
    """One event. Kafka keeps the order of events with the same ``aggregateid``, which is their key.

    Its declaration is the file ``connect/events/<aggregatetype>/<type>.v<schema_version>.schema.json``. The fields are
    the columns that every ``append`` writes. The database adds the id (a UUIDv7) and the time.
    """

    aggregatetype: str
    aggregateid: str
    type: str
    payload: Any
    """A mapping, a dataclass, a msgspec Struct or a pydantic model; `append` writes it as JSON."""
    schema_version: int = 1
    traceparent: str | None = None  # W3C trace context of the request that caused it

    @classmethod
    def of(cls, payload: Payload, traceparent: str | None = None) -> Event:
        """The event of a typed payload, whose class is of one version of one event type."""
        aggregatetype, type_, schema_version, key = payload.__event__
        return cls(aggregatetype, str(getattr(payload, key)), type_, payload, schema_version, traceparent)


COLUMNS = tuple(field.name for field in fields(Event))


def require_transaction(connection: Any) -> None:
    """Raise Failure `not-in-a-transaction` if a driver's connection would commit a statement by itself.

    It would if it is in autocommit mode and no transaction is open. Drivers without the attribute ``autocommit``, which
    DB-API does not require, are in a transaction always. Drivers that do not report the status of the transaction are
    taken to have none open.
    """
    status = getattr(getattr(connection, "info", None), "transaction_status", IDLE)
    if getattr(connection, "autocommit", False) and status == IDLE:
        raise Failure(
            "append: the connection is in autocommit mode, which would commit the events without the change",
            "begin a transaction: engine.begin(), transaction.atomic(), or autocommit = False",
            code="not-in-a-transaction",
        )


@contextmanager
def appending(events: Sequence[Event]) -> Iterator[Sequence[Event]]:
    """The events, those without a traceparent with that of this append's span, if it has one (`outbox.base.spans`)."""
    if not spans.are_recorded():
        yield events
        return
    aggregates = declared(os.environ.get(project.VARIABLE)).aggregates
    topics = {aggregates[event.aggregatetype].topic for event in events if event.aggregatetype in aggregates}
    with spans.appended(topics, len(events)) as found:
        yield [event if event.traceparent is not None else replace(event, traceparent=found) for event in events]


def rows(events: Sequence[Event]) -> list[dict[str, Any]]:
    """The events as rows of the outbox, by column; the payload is JSON text.

    Raises Failure for the first event that is not declared (`event-undeclared`), that is deprecated
    (`event-deprecated`), whose payload a sink would set aside or whose aggregateid or traceparent is too long for the
    relay (`event-invalid`), or whose payload has another key (`event-key-mismatch`).
    """
    known = declared(os.environ.get(project.VARIABLE))
    return [_row(event, known) for event in events]


@cache
def declared(_named: str | None) -> Catalog:
    """The events of this process's project, which ``OUTBOX_PROJECT`` may name. They are read once."""
    chosen = project.current()
    return catalog.load(chosen.events, chosen.topic_prefix)


def _row(event: Event, known: Catalog) -> dict[str, Any]:
    schema = known.schema(event.aggregatetype, event.type, event.schema_version)
    if schema.is_deprecated:
        remedy = f'write a newer version of it, or remove "deprecated" from {known.folder / schema.file}'
        raise Failure(f"event {schema.name} is deprecated", remedy, code="event-deprecated")
    for name in ("aggregateid", "traceparent"):
        if len(str(getattr(event, name)).encode(errors="replace")) > KEY_MAX_BYTES:
            raise _invalid(schema, f"its {name} has more than {KEY_MAX_BYTES} bytes")
    try:
        encoded = encode(event.payload)
    except NOT_ENCODABLE as error:
        reason = type(error).__name__ if schema.is_personal else error
        raise _invalid(schema, f"the payload cannot be written as JSON: {reason}") from (
            None if schema.is_personal else error
        )
    _require_valid(event, encoded, schema, known.aggregates[event.aggregatetype].key)
    return {**vars(event), "payload": encoded.decode()}


def _require_valid(event: Event, encoded: bytes, schema: EventSchema, key: str) -> None:
    payload, rejection = parse_json(encoded)
    if rejection is not None:
        raise _invalid(schema, rejection.detail)
    schema.require_valid(payload)
    if (without_place := misfit(schema, payload)) is not None:
        raise _invalid(schema, f"$.{without_place.name}: {without_place.detail}")
    if b"\\u0000" in encoded and ESCAPED_NUL.search(encoded.decode()):
        raise _invalid(schema, "a text contains NUL, which Postgres cannot store")
    repeated = str(convert(_type(schema, key), payload[key]))
    if event.aggregateid != repeated:
        values = ("", "") if schema.is_personal else (f" {event.aggregateid!r}", f", {repeated!r}")
        raise Failure(
            f"event {schema.name}: its aggregateid{values[0]} is not its {key}{values[1]}",
            f"both must be the same text: {key} repeats the key of the record",
            code="event-key-mismatch",
        )


@cache
def _type(schema: EventSchema, name: str) -> SqlType:
    return next(column.type for column in schema.columns if column.name == name)


def _invalid(schema: EventSchema, problem: str) -> Failure:
    return Failure(f"{schema.name}: {shortened(problem)}", code="event-invalid")
