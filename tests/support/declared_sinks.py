"""Sinks of events that a test has declared (`tests.support.declared`)."""

from __future__ import annotations

from pathlib import Path

from outbox.events.catalog import Catalog
from outbox.sink import strategy
from outbox.sink.postgres.target import PostgresTarget
from outbox.sink.records import EventDecoder
from outbox.sink.spec import SinkJob, SinkSpec


def decoders(known: Catalog, *names: str) -> dict[str, EventDecoder]:
    """By topic, the decoder of the events of these names."""
    wanted = known.wanted(names)
    return {
        topic: EventDecoder(aggregates, mine)
        for topic, aggregates in known.topics.items()
        if (mine := [one for one in wanted if known.aggregates[one.schema.aggregate] in aggregates])
    }


def decoder(known: Catalog, *names: str) -> EventDecoder:
    """The decoder of the events of these names, which are on one topic."""
    (found,) = decoders(known, *names).values()
    return found


def sink(
    known: Catalog, *names: str, projections: Path, name: str = "orders", by: str | Path = "dedup", topic: str = ""
) -> SinkSpec:
    """A sink of these events, on all their topics or on one of them."""
    found = {of: one for of, one in decoders(known, *names).items() if topic in ("", of)}
    job = SinkJob(name=name, projections=projections, target=PostgresTarget(), events=names, strategy=by)
    return SinkSpec(name, job, strategy.find(by), found)
