"""Parcel events in, parcels per depot out."""

from __future__ import annotations

from pathlib import Path

from outbox.base import project
from outbox.base.settings import Settings
from outbox.sink.postgres.target import PostgresTarget
from outbox.sink.records import EventDecoder
from outbox.sink.spec import SinkJob
from outbox.writing.contract import EventSchema

PROJECTIONS = Path(__file__).with_name("projections")


def decoder(settings: Settings) -> EventDecoder:
    """How an event is read: the one declaration of the event."""
    schema = EventSchema(project.current().connect / "events" / "parcels-event.v1.schema.json")
    return EventDecoder(
        schema, key="depot_id", version="version", quantity="count", age_max_days=settings.sink_id_age_max_days
    )


def jobs(settings: Settings) -> list[SinkJob]:
    """One job, with every built-in strategy."""
    return [SinkJob(topic=settings.topic, decoder=decoder(settings), projections=PROJECTIONS, target=PostgresTarget())]
