"""Events of the fixture domain's orders."""

from __future__ import annotations

import json
from random import Random

from outbox.sink.decoding.records import Record
from tests.support.made_events import NOW_MS, nth_key, uuid7

RANDOM = Random(42)  # noqa: S311
MOMENT = "2026-11-21T10:00:00.123456Z"


def placed(key: str, version: int, *, item: str = nth_key(1), quantity: int = 1, unit: str | None = None) -> Record:
    """The record of an order; with a unit it is of version 2."""
    value = {"order_id": key, "item_id": item, "quantity": quantity, "version": version, "occurred_at": MOMENT}
    return _record("placed", 1, value) if unit is None else _record("placed", 2, value | {"unit": unit})


def cancelled(key: str, version: int, reason: str | None = None) -> Record:
    """The record of a cancellation."""
    value = {"order_id": key, "version": version, "occurred_at": MOMENT}
    return _record("cancelled", 1, value if reason is None else value | {"reason": reason})


def _record(type_: str, schema_version: int, value: dict[str, object]) -> Record:
    headers = {"id": uuid7(RANDOM), "eventType": type_, "schemaVersion": str(schema_version)}
    encoded = [(name, text.encode()) for name, text in headers.items()]
    return Record(str(value["order_id"]).encode(), encoded, json.dumps(value).encode(), NOW_MS)
