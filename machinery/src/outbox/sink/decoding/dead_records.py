"""A record that is no event, as a row of a dead letter: all of the record, and the reason."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from outbox.kafka.spec import Header
from outbox.sink.decoding import binary
from outbox.sink.decoding.records import DeadRecord, Record
from outbox.sink.decoding.values import Type, columns_of

CONTROL = re.compile(r"[\x00-\x1f\x7f]")
LAST_MS = 253_402_300_799_000  # the last second of the year 9999: a foreign producer may claim any time
TYPES: Mapping[str, Type] = {
    "identity": "text",
    "partition": "integer",
    "offset": "bigint",
    "key": "bytea",
    "headers": "jsonb",
    "value": "bytea",
    "recorded_at": "timestamptz",
    "event_id": "uuid",
    "reason": "text",
    "detail": "text",
}


def identity(record: Record, event_id: str | None) -> str:
    """The event's id, else a hash of key, headers and value: the same for a record that is repeated."""
    return event_id or f"sha256:{digest(record)}"


def digest(record: Record) -> str:
    """A hash of key, headers and value."""
    found = hashlib.sha256()
    headers = (part for name, content in record.headers for part in (name.encode(), content))
    for part in (record.key, record.value, *headers):
        # Each part with its length, so that no two records run together to the same bytes.
        found.update(b"-" if part is None else b"%d:%b" % (len(part), part))
    return found.hexdigest()


def encode(dead: Sequence[DeadRecord]) -> binary.Encoded:
    """Dead records for a COPY into a table of these TYPES."""
    rows = [(identity(one.record, one.event_id), *columns(one)) for one in dead]
    return binary.encode(columns_of(TYPES, rows), TYPES)


def headers(stored: Sequence[dict[str, Any]]) -> list[Header]:
    """Headers of a record, from the JSON that its dead letter keeps."""
    return [((_bytes("key", header) or b"").decode(), _bytes("value", header)) for header in stored]


def columns(dead: DeadRecord) -> tuple[object, ...]:
    """The record as a row of dead_letters, from its partition to its detail."""
    record = dead.record
    return (
        dead.partition,
        dead.offset,
        record.key,
        json.dumps([_header(name, content) for name, content in record.headers], ensure_ascii=False),
        record.value,
        datetime.fromtimestamp(min(max(record.recorded_ms, 0), LAST_MS) / 1000, UTC),
        dead.event_id,
        *dead.rejection,
    )


def record(
    key: memoryview | None, headers_: Sequence[dict[str, Any]], value: memoryview | None, recorded_ms: int = 0
) -> Record:
    """The record of a dead letter, from its columns as psycopg2 returns them."""
    return Record(content(key), headers(headers_), content(value), recorded_ms)


def content(stored: memoryview | None) -> bytes | None:
    """Bytes as psycopg2 returns them."""
    return None if stored is None else bytes(stored)


def _header(name: str, content: bytes | None) -> dict[str, str | None]:
    """A header as JSON. In base64 is what jsonb does not hold, and what JSON needs six times the room for."""
    return {**_json("key", name.encode()), **_json("value", content)}


def _json(field: str, content: bytes | None) -> dict[str, str | None]:
    try:
        text = None if content is None else content.decode()
    except UnicodeDecodeError:
        text = "\0"
    if text is not None and CONTROL.search(text):
        return {f"{field}_base64": base64.b64encode(content or b"").decode()}
    return {field: text}


def _bytes(field: str, header: Mapping[str, Any]) -> bytes | None:
    encoded, text = header.get(f"{field}_base64"), header.get(field)
    if encoded is not None:
        return base64.b64decode(encoded)
    return None if text is None else str(text).encode()
