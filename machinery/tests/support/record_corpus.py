"""Records good and bad, and what is wrong with each: the corpus that every reader of events is tested on."""

from __future__ import annotations

import json
import uuid
from random import Random
from typing import Any

from outbox.events.schema import Rejection
from outbox.kafka.spec import Header
from outbox.sink.decoding.records import DeadRecord, Record
from tests.items import LESS, UNIT, payload
from tests.support.made_events import DAY_MS, NOW_MS, Event, uuid7

KEY = str(uuid.UUID(int=1))
ID = uuid7(Random(1))  # noqa: S311
GOOD: dict[str, Any] = payload(str(uuid.UUID(int=2)), KEY, -5, 1, total_after=10)
HEADERS = {"id": ID, "eventType": LESS, "schemaVersion": "1"}


def changed(**changes: Any) -> bytes:
    """The good value with some properties changed; others are new properties."""
    return json.dumps(GOOD | changes).encode()


def without(name: str) -> bytes:
    """The good value without one property, by its name in the record."""
    return json.dumps({key: value for key, value in GOOD.items() if key != name}).encode()


def raw(name: str, text: str) -> bytes:
    """A value with one property written in a way that Python's json would not."""
    return changed(**{name: "@"}).replace(b'"@"', text.encode())


def pairs(headers: dict[str, Any]) -> list[Header]:
    return [(name, None if text is None else text.encode()) for name, text in headers.items()]


def record(
    value: bytes | None = changed(),
    headers: dict[str, Any] = HEADERS,
    key: bytes | None = KEY.encode(),
    recorded_ms: int = NOW_MS,
) -> Record:
    """A record as Kafka has it; a good one unless said otherwise."""
    return Record(key, pairs(headers), value, recorded_ms)


def unread(event: Event, offset: int, *, version: str = "1", reason: str = "unknown schema version") -> DeadRecord:
    """The event's record, from a time when the contract did not know such records."""
    headers = HEADERS | {"id": event.event_id, "eventType": event.type, "schemaVersion": version}
    found = record(json.dumps(event.payload()).encode(), headers, event.key.encode())
    return DeadRecord(0, offset, found, event.event_id, Rejection(reason, "of another time"))


# By name: a value, and the reason why it cannot be applied, if it cannot.
VALUES: dict[str, tuple[bytes | None, str | None]] = {
    "good": (changed(), None),
    "new property": (changed(note="ünknown", nested={"list": "no"}), None),
    "space around": (b" \n" + changed() + b" ", None),
    "big": (changed(note="x" * 1_000_000), None),
    "biggest quantity": (changed(quantity=2**63 - 1), None),
    "smallest quantity": (changed(quantity=-(2**63)), None),
    "integer with a point": (raw("quantity", "7.0"), None),
    "integer with an exponent": (raw("quantity", "7E+2"), None),
    "a key twice": (changed()[:-1] + b', "quantity": 7}', None),
    "tombstone": (None, "no value"),
    "empty": (b"", "not JSON"),
    "words": (b"hello", "not JSON"),
    "cut off": (changed()[:-1], "not JSON"),
    "more behind it": (changed() + b"x", "not JSON"),
    "two of them": (changed() + changed(), "not JSON"),
    "two in a list": (changed() + b"," + changed(), "not JSON"),
    "closing what it did not open": (changed() + b"] [" + changed(), "not JSON"),
    "no number": (raw("quantity", "NaN"), "not JSON"),
    "infinity": (raw("quantity", "-Infinity"), "not JSON"),
    "byte order mark": (b"\xef\xbb\xbf" + changed(), "not JSON"),
    "UTF-16": (changed().decode().encode("utf-16"), "not UTF-8"),
    "not UTF-8": (changed().replace(UNIT.encode(), b"\xff"), "not UTF-8"),
    "not UTF-8 where nobody looks": (changed(note="@").replace(b"@", b"\xff"), "not UTF-8"),
    "half a character": (raw("unit", r'"\ud800"'), "not JSON"),
    "half a character where nobody looks": (raw("note", r'"a\udc00b"'), "not JSON"),
    "NUL": (changed(unit="KG\0"), "schema violation"),
    "NUL where nobody looks": (changed(note="a\0"), None),
    "a list": (b"[1]", "schema violation"),
    "a number": (b"1", "schema violation"),
    "null": (b"null", "schema violation"),
    "200 levels": (raw("note", "[" * 199 + "]" * 199), None),
    "201 levels": (raw("note", '{"a":[' * 100 + "]}" * 100), "not JSON"),
    "wide": (raw("note", "[" + "[]," * 1000 + "{}]"), None),
    "deep": (b"[" * 5000 + b"]" * 5000, "not JSON"),
    "quantity as text": (changed(quantity="5"), "schema violation"),
    "quantity with a fraction": (changed(quantity=5.5), "schema violation"),
    "quantity with a fraction that a float loses": (raw("quantity", "9007199254740993.5"), "schema violation"),
    "quantity true": (changed(quantity=True), "schema violation"),
    "quantity null": (changed(quantity=None), "schema violation"),
    "quantity zero": (changed(quantity=0), "schema violation"),
    "quantity zero with a point": (raw("quantity", "-0.0"), "schema violation"),
    "quantity beyond bigint": (changed(quantity=2**63), "schema violation"),
    "quantity beyond bigint with a point": (raw("quantity", "9223372036854775808.0"), "schema violation"),
    "quantity far beyond bigint": (changed(quantity=10**60), "schema violation"),
    "quantity of 5,000 digits": (raw("quantity", "1" * 5000), "not JSON"),
    "a big exponent": (raw("quantity", "1e999999"), "not JSON"),
    "a small exponent": (raw("quantity", "1e-999999"), "not JSON"),
    "an exponent beyond all bounds": (raw("quantity", "1e99999999999999999999"), "not JSON"),
    "more digits than Postgres has room for": (raw("note", "0." + "3" * 20_000), "not JSON"),
    "a big exponent where nobody looks": (raw("note", "1e999999999"), "not JSON"),
    "version zero": (changed(version=0), "schema violation"),
    "unit as number": (changed(unit=978), "schema violation"),
    "unit too long": (changed(unit=UNIT + "S"), "schema violation"),
    "unit with a line end": (changed(unit=UNIT + "\n"), "schema violation"),
    "unit with a line end of two": (changed(unit="KG\n"), "schema violation"),
    "unit an object": (changed(unit={"code": UNIT}), "schema violation"),
    "key not a uuid": (changed(item_id="1"), "schema violation"),
    "no such day": (changed(occurred_at="2026-02-30T05:00:00Z"), "schema violation"),
    "the year zero": (changed(occurred_at="0000-02-03T05:00:00Z"), "schema violation"),
    "leap second": (changed(occurred_at="2016-12-31T23:59:60Z"), "schema violation"),
    "time without zone": (changed(occurred_at="2026-11-21T05:00:00"), "schema violation"),
    "time with a line end": (changed(occurred_at="2026-11-21T05:00:00Z\n"), "schema violation"),
    **{f"no {name}": (without(name), "schema violation") for name in GOOD},
}
# The same of headers.
HEADERS_OF: dict[str, tuple[dict[str, Any], str | None]] = {
    "good": (HEADERS, None),
    "trace": (HEADERS | {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}, None),
    "null trace": (HEADERS | {"traceparent": None}, None),
    "unknown header": (HEADERS | {"x": "y"}, None),
    "no id": ({"eventType": LESS, "schemaVersion": "1"}, "missing id"),
    "null id": (HEADERS | {"id": None}, "missing id"),
    "empty id": (HEADERS | {"id": ""}, "malformed id"),
    "words as id": (HEADERS | {"id": "hello"}, "malformed id"),
    "id with a line end": (HEADERS | {"id": ID + "\n"}, "malformed id"),
    "id in capitals": (HEADERS | {"id": ID.upper()}, "malformed id"),
    "id of another version": (HEADERS | {"id": f"{ID[:14]}4{ID[15:]}"}, "malformed id"),
    "id of another variant": (HEADERS | {"id": f"{ID[:19]}c{ID[20:]}"}, "malformed id"),
    "id with a letter": (HEADERS | {"id": f"{ID[:-1]}g"}, "malformed id"),
    "id with its hyphens elsewhere": (HEADERS | {"id": f"{ID[:7]}-{ID[7]}{ID[9:]}"}, "malformed id"),
    "random id": (HEADERS | {"id": str(uuid.UUID(int=5, version=4))}, "malformed id"),
    "id from tomorrow, almost": (HEADERS | {"id": uuid7(Random(2), NOW_MS + DAY_MS - 600_000)}, None),  # noqa: S311
    "id from the future": (HEADERS | {"id": uuid7(Random(2), NOW_MS + 2 * DAY_MS)}, "id from the future"),  # noqa: S311
    "id of the last millisecond": (HEADERS | {"id": uuid7(Random(2), 2**48 - 1)}, "id from the future"),  # noqa: S311
    "id of nine years ago": (HEADERS | {"id": uuid7(Random(2), NOW_MS - 9 * 365 * DAY_MS)}, None),  # noqa: S311
    "id of eleven years ago": (HEADERS | {"id": uuid7(Random(2), NOW_MS - 11 * 365 * DAY_MS)}, "id too old"),  # noqa: S311
    "id of 1970": (HEADERS | {"id": uuid7(Random(2), 0)}, "id too old"),  # noqa: S311
    "unknown type": (HEADERS | {"eventType": "never.heard"}, "unknown event type"),
    "no type": ({"id": ID, "schemaVersion": "1"}, "unknown event type"),
    "newer version": (HEADERS | {"schemaVersion": "2"}, "unknown schema version"),
    "no version": ({"id": ID, "eventType": LESS}, "unknown schema version"),
    "version with a line end": (HEADERS | {"schemaVersion": "1\n"}, "unknown schema version"),
}
