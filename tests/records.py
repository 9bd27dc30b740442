"""Records good and bad, and what is wrong with each: the corpus that all who judge events are tested on."""

from __future__ import annotations

import json
import uuid
from random import Random
from typing import Any
from uuid import UUID

from outbox.sink.dead_letters import DeadLetter
from tests.sink import NOW_MS, TOPIC, Event, uuid7

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


def unread(event: Event, offset: int, *, version: str = "1", reason: str = "unknown schema version") -> DeadLetter:
    """A letter of the event's record, from a time when the contract did not know such records."""
    names = ("account_id", "amount", "currency", "balance_after", "version")
    properties = {name: getattr(event, name) for name in names}
    headers = HEADERS | {"id": event.event_id, "schemaVersion": version}
    return DeadLetter(
        topic=TOPIC,
        partition=0,
        offset=offset,
        key=event.account_id.encode(),
        headers=[(name, text.encode()) for name, text in headers.items()],
        value=changed(**properties),
        recorded_ms=NOW_MS,
        event_id=UUID(event.event_id),
        reason=reason,
        detail="of another time",
    )


# By name: a value, and the reason why it cannot be applied, if it cannot.
VALUES: dict[str, tuple[bytes | None, str | None]] = {
    "good": (changed(), None),
    "new property": (changed(note="ünknown", nested={"amount": "no"}), None),
    "space around": (b" \n" + changed() + b" ", None),
    "big": (changed(note="x" * 1_000_000), None),
    "biggest amount": (changed(amount=2**63 - 1), None),
    "smallest amount": (changed(amount=-(2**63)), None),
    "integer with a point": (raw("amount", "7.0"), "unreadable"),
    "tombstone": (None, "no value"),
    "empty": (b"", "not JSON"),
    "words": (b"hello", "not JSON"),
    "cut off": (changed()[:-1], "not JSON"),
    "more behind it": (changed() + b"x", "not JSON"),
    "two of them": (changed() + changed(), "not JSON"),
    "two in a list": (changed() + b"," + changed(), "not JSON"),
    "closing what it did not open": (changed() + b"] [" + changed(), "not JSON"),
    "not UTF-8": (changed().replace(b"EUR", b"E\xffR"), "not UTF-8"),
    "not UTF-8 where nobody looks": (changed(note="@").replace(b"@", b"\xff"), "not UTF-8"),
    "NUL": (changed(currency="EU\0"), "schema violation"),
    "NUL where nobody looks": (changed(note="a\0"), None),
    "a list": (b"[1]", "schema violation"),
    "a number": (b"1", "schema violation"),
    "null": (b"null", "schema violation"),
    "deep": (b"[" * 5000 + b"]" * 5000, "not JSON"),
    "amount as text": (changed(amount="5"), "schema violation"),
    "amount with a fraction": (changed(amount=5.5), "schema violation"),
    "amount true": (changed(amount=True), "schema violation"),
    "amount null": (changed(amount=None), "schema violation"),
    "amount zero": (changed(amount=0), "schema violation"),
    "amount beyond bigint": (changed(amount=2**63), "schema violation"),
    "amount far beyond bigint": (changed(amount=10**60), "schema violation"),
    "version zero": (changed(version=0), "schema violation"),
    "currency as number": (changed(currency=978), "schema violation"),
    "currency too long": (changed(currency="EURO"), "schema violation"),
    "currency with a line end": (changed(currency="EUR\n"), "schema violation"),
    "currency an object": (changed(currency={"code": "EUR"}), "schema violation"),
    "account not a uuid": (changed(account_id="1"), "schema violation"),
    "no such day": (changed(occurred_at="2026-02-30T05:00:00Z"), "schema violation"),
    "time without zone": (changed(occurred_at="2026-11-21T05:00:00"), "schema violation"),
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
    "random id": (HEADERS | {"id": str(uuid.UUID(int=5, version=4))}, "malformed id"),
    "id from tomorrow, almost": (HEADERS | {"id": uuid7(Random(2), NOW_MS + DAY_MS - 600_000)}, None),  # noqa: S311
    "id from the future": (HEADERS | {"id": uuid7(Random(2), NOW_MS + 2 * DAY_MS)}, "id from the future"),  # noqa: S311
    "unknown type": (HEADERS | {"eventType": "transfer.undone"}, "unknown event type"),
    "no type": ({"id": ID, "schemaVersion": "1"}, "unknown event type"),
    "newer version": (HEADERS | {"schemaVersion": "2"}, "unknown schema version"),
    "no version": ({"id": ID, "eventType": "transfer.debited"}, "unknown schema version"),
}
