"""What a service has put into the outbox, as the topic would carry it."""

from __future__ import annotations

from typing import Any

from outbox.base.settings import Settings
from tests.support.queries import query


def as_records(settings: Settings) -> list[dict[str, Any]]:
    """The events in the outbox table, the oldest first, as a record of the topic would carry them."""
    rows = query(
        settings, "SELECT id::text, aggregateid, type, schema_version, payload, traceparent FROM outbox ORDER BY id"
    )
    return [
        {
            "key": key,
            "headers": {"id": id_, "eventType": type_, "schemaVersion": str(version), "traceparent": traceparent},
            "value": payload,
        }
        for id_, key, type_, version, payload, traceparent in rows
    ]
