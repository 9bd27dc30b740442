"""Ledger events in, balances out."""

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
    """How a ledger event is read: the one declaration that decoding, staging, parking, replay and `check` use."""
    schema = EventSchema(project.current().connect / "events" / "ledger-event.v1.schema.json")
    return EventDecoder(
        schema, key="account_id", version="version", quantity="amount", age_max_days=settings.sink_id_age_max_days
    )


def jobs(settings: Settings) -> list[SinkJob]:
    """One job, with every built-in strategy."""
    return [SinkJob(topic=settings.topic, decoder=decoder(settings), projections=PROJECTIONS, target=PostgresTarget())]
