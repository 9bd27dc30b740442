"""Events as `append` validates them, and as the service has put them into the outbox."""

from __future__ import annotations

from typing import Any

from outbox.base.settings import Settings
from outbox.events import catalog
from outbox.writing.event import Event, rows
from outbox_lab.testing.queries import query


def check_events(*events: Event) -> None:
    """Raises Failure for the first event that `append` would refuse, with the same code. It needs no database."""
    rows(events)


def outbox_records(settings: Settings) -> list[dict[str, Any]]:
    """The events in the outbox table, the oldest first, as a record of the topic would carry them."""
    topics = {name: aggregate.topic for name, aggregate in catalog.of_project(settings).aggregates.items()}
    found = query(
        settings,
        "SELECT id::text, aggregatetype, aggregateid, type, schema_version, payload, traceparent"
        " FROM public.outbox ORDER BY id",
    )
    return [
        {
            "topic": topics[aggregate],
            "key": key,
            "headers": {"id": id_, "eventType": type_, "schemaVersion": str(version), "traceparent": traceparent},
            "value": payload,
        }
        for id_, aggregate, key, type_, version, payload, traceparent in found
    ]
