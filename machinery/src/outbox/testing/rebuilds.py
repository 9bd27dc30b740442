"""A sink that is set to what the source says, without Kafka."""

from __future__ import annotations

from decimal import Decimal

from outbox.base.settings import Settings
from outbox.kafka.topics import Topic
from outbox.sink import discovery
from outbox.sink.repair.rebuild import from_source
from outbox.testing.records import TOPIC_ID


def rebuild(settings: Settings, sink: str) -> dict[str, Decimal]:
    """Set a sink to what the source says, as `outbox rebuild SINK --from source` does. Returns by key how much more the
    sink holds now.

    Raises Failure if the sink cannot be rebuilt.
    """
    chosen = discovery.chosen(settings, sink)
    topics = [Topic(name, TOPIC_ID, 1) for name in chosen.topics]
    return from_source(settings, chosen, topics, {topic.name: {0: 0} for topic in topics}).differences
