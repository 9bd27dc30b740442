"""Records good and bad, and what is wrong with each: the corpus that the validator is tested on."""

from __future__ import annotations

import json
import uuid
from random import Random
from typing import Any

from outbox.sink.batch import DeadRecord
from outbox.sink.records import Header, Record, Rejection
from tests.sink import NOW_MS, Event, uuid7

ID = uuid7(Random(1))  # noqa: S311
ACCOUNT = str(uuid.UUID(int=1))
GOOD: dict[str, Any] = {
    "transfer_id": str(uuid.UUID(int=2)),
    "account_id": ACCOUNT,
    "amount": -5,
    "currency": "EUR",
    "balance_after": 10,
    "version": 1,
    "occurred_at": "2026-11-21T05:00:00.123456Z",
}
HEADERS = {"id": ID, "eventType": "transfer.debited", "schemaVersion": "1"}
DAY_MS = 24 * 60 * 60 * 1000


def changed(**changes: Any) -> bytes:
    return json.dumps(GOOD | changes).encode()


def without(name: str) -> bytes:
    return json.dumps({key: value for key, value in GOOD.items() if key != name}).encode()


def raw(name: str, text: str) -> bytes:
    """A value with one property written in a way that Python's json would not."""
    return json.dumps(GOOD | {name: "@"}).replace('"@"', text).encode()


def pairs(headers: dict[str, Any]) -> list[Header]:
    """Headers as a record has them."""
    return [(name, None if text is None else text.encode()) for name, text in headers.items()]


def record(
    value: bytes | None = changed(),
    headers: dict[str, Any] = HEADERS,
    key: bytes | None = ACCOUNT.encode(),
    recorded_ms: int = NOW_MS,
) -> Record:
    """A record as Kafka has it; a good one unless said otherwise."""
    return Record(key, pairs(headers), value, recorded_ms)


def unread(event: Event, offset: int, *, version: str = "1", reason: str = "unknown schema version") -> DeadRecord:
    """The event's record, from a time when the contract did not know such records."""
    names = ("account_id", "amount", "currency", "balance_after", "version")
    properties = {name: getattr(event, name) for name in names}
    headers = HEADERS | {"id": event.event_id, "schemaVersion": version}
    found = record(changed(transfer_id=event.event_id, **properties), headers, event.account_id.encode())
    return DeadRecord(0, offset, found, event.event_id, Rejection(reason, "of another time"))


# By name: a value, and the reason why it cannot be applied, if it cannot.
VALUES: dict[str, tuple[bytes | None, str | None]] = {
    "good": (changed(), None),
    "new property": (changed(note="ünknown", nested={"amount": "no"}), None),
    "space around": (b" \n" + changed() + b" ", None),
    "big": (changed(note="x" * 1_000_000), None),
    "biggest amount": (changed(amount=2**63 - 1), None),
    "smallest amount": (changed(amount=-(2**63)), None),
    "integer with a point": (raw("amount", "7.0"), None),
    "integer with an exponent": (raw("amount", "7E+2"), None),
    "a key twice": (changed()[:-1] + b', "amount": 7}', None),
    "tombstone": (None, "no value"),
    "empty": (b"", "not JSON"),
    "words": (b"hello", "not JSON"),
    "cut off": (changed()[:-1], "not JSON"),
    "more behind it": (changed() + b"x", "not JSON"),
    "two of them": (changed() + changed(), "not JSON"),
    "two in a list": (changed() + b"," + changed(), "not JSON"),
    "closing what it did not open": (changed() + b"] [" + changed(), "not JSON"),
    "no number": (raw("amount", "NaN"), "not JSON"),
    "infinity": (raw("amount", "-Infinity"), "not JSON"),
    "byte order mark": (b"\xef\xbb\xbf" + changed(), "not JSON"),
    "UTF-16": (changed().decode().encode("utf-16"), "not JSON"),
    "not UTF-8": (changed().replace(b"EUR", b"E\xffR"), "not UTF-8"),
    "not UTF-8 where nobody looks": (changed(note="@").replace(b"@", b"\xff"), "not UTF-8"),
    "half a character": (raw("currency", r'"\ud800"'), "not JSON"),
    "half a character where nobody looks": (raw("note", r'"a\udc00b"'), "not JSON"),
    "NUL": (changed(currency="EU\0"), "schema violation"),
    "NUL where nobody looks": (changed(note="a\0"), None),
    "a list": (b"[1]", "schema violation"),
    "a number": (b"1", "schema violation"),
    "null": (b"null", "schema violation"),
    "deep": (b"[" * 5000 + b"]" * 5000, "not JSON"),
    "amount as text": (changed(amount="5"), "schema violation"),
    "amount with a fraction": (changed(amount=5.5), "schema violation"),
    "amount with a fraction that a float loses": (raw("amount", "9007199254740993.5"), "schema violation"),
    "amount true": (changed(amount=True), "schema violation"),
    "amount null": (changed(amount=None), "schema violation"),
    "amount zero": (changed(amount=0), "schema violation"),
    "amount zero with a point": (raw("amount", "-0.0"), "schema violation"),
    "amount beyond bigint": (changed(amount=2**63), "schema violation"),
    "amount beyond bigint with a point": (raw("amount", "9223372036854775808.0"), "schema violation"),
    "amount far beyond bigint": (changed(amount=10**60), "schema violation"),
    "amount of 5,000 digits": (raw("amount", "1" * 5000), "not JSON"),
    "a big exponent": (raw("amount", "1e999999"), "not JSON"),
    "a small exponent": (raw("amount", "1e-999999"), "not JSON"),
    "an exponent beyond all bounds": (raw("amount", "1e99999999999999999999"), "not JSON"),
    "more digits than Postgres has room for": (raw("note", "0." + "3" * 20_000), "not JSON"),
    "a big exponent where nobody looks": (raw("note", "1e999999999"), "not JSON"),
    "version zero": (changed(version=0), "schema violation"),
    "currency as number": (changed(currency=978), "schema violation"),
    "currency too long": (changed(currency="EURO"), "schema violation"),
    "currency with a line end": (changed(currency="EUR\n"), "schema violation"),
    "currency with a line end of two": (changed(currency="EU\n"), "schema violation"),
    "currency an object": (changed(currency={"code": "EUR"}), "schema violation"),
    "account not a uuid": (changed(account_id="1"), "schema violation"),
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
    "no id": ({"eventType": "transfer.debited", "schemaVersion": "1"}, "missing id"),
    "null id": (HEADERS | {"id": None}, "missing id"),
    "empty id": (HEADERS | {"id": ""}, "malformed id"),
    "words as id": (HEADERS | {"id": "hello"}, "malformed id"),
    "id with a line end": (HEADERS | {"id": ID + "\n"}, "malformed id"),
    "id in capitals": (HEADERS | {"id": ID.upper()}, "malformed id"),
    "random id": (HEADERS | {"id": str(uuid.UUID(int=5, version=4))}, "malformed id"),
    "id from tomorrow, almost": (HEADERS | {"id": uuid7(Random(2), NOW_MS + DAY_MS - 600_000)}, None),  # noqa: S311
    "id from the future": (HEADERS | {"id": uuid7(Random(2), NOW_MS + 2 * DAY_MS)}, "id from the future"),  # noqa: S311
    "id of the last millisecond": (HEADERS | {"id": uuid7(Random(2), 2**48 - 1)}, "id from the future"),  # noqa: S311
    "id of nine years ago": (HEADERS | {"id": uuid7(Random(2), NOW_MS - 9 * 365 * DAY_MS)}, None),  # noqa: S311
    "id of eleven years ago": (HEADERS | {"id": uuid7(Random(2), NOW_MS - 11 * 365 * DAY_MS)}, "id too old"),  # noqa: S311
    "id of 1970": (HEADERS | {"id": uuid7(Random(2), 0)}, "id too old"),  # noqa: S311
    "unknown type": (HEADERS | {"eventType": "transfer.undone"}, "unknown event type"),
    "no type": ({"id": ID, "schemaVersion": "1"}, "unknown event type"),
    "newer version": (HEADERS | {"schemaVersion": "2"}, "unknown schema version"),
    "no version": ({"id": ID, "eventType": "transfer.debited"}, "unknown schema version"),
    "version with a line end": (HEADERS | {"schemaVersion": "1\n"}, "unknown schema version"),
}
