"""Which events of the outbox table have arrived on the topic, by their ids alone.

A record that breaks the contract has arrived too: the relay has done its part.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from uuid import UUID

from confluent_kafka import Message

from outbox.base.database import connect, database_errors
from outbox.base.settings import Settings, SourceRole
from outbox.base.wait import WaitTimeoutError, wait_for
from outbox.kafka import records, topics
from outbox.kafka.headers import headers_of

CLOCK_MARGIN = timedelta(minutes=10)  # that the clocks of source and brokers may differ
FETCH_ROWS = 10_000
POLL_S = 0.5


def id_of(message: Message) -> UUID:
    """The id of a record's event. Raises KeyError or ValueError if it has none."""
    content = dict(headers_of(message))["id"]
    if content is None:
        raise ValueError("header id is null")
    return UUID(content.decode())


def all_arrive(settings: Settings, timeout_s: float) -> bool:
    """Whether every event that the outbox holds now is on the topic within ``timeout_s``.

    It reads the topic once, from the time of the oldest event. Raises Failure if database or Kafka is unavailable.
    """
    missing, oldest = _written(settings)
    if not missing:
        return True
    arrived = _arrived(settings, missing, oldest)
    try:
        return wait_for("the outbox to be on the topic", arrived, timeout_s=timeout_s, poll_s=POLL_S)
    except WaitTimeoutError:
        return False


def _written(settings: Settings) -> tuple[set[bytes], datetime]:
    """The ids of the events in the outbox, and the time of the oldest."""
    found, oldest = set[bytes](), datetime.now(UTC)
    with (
        closing(connect(settings, SourceRole.AUDITOR)) as connection,
        database_errors(connection, "reading the outbox", "refused", "run it again"),
        connection.cursor(name="arrivals") as cursor,
    ):
        cursor.itersize = FETCH_ROWS
        cursor.execute("SELECT id, occurred_at AT TIME ZONE 'utc' FROM outbox")
        for event_id, occurred_at in cursor:
            found.add(UUID(event_id).bytes)
            oldest = min(oldest, occurred_at)
    return found, oldest


def _arrived(settings: Settings, missing: set[bytes], oldest: datetime) -> Callable[[], bool]:
    """A function that reads on, takes what it finds out of ``missing``, and returns whether nothing is left."""
    ends = topics.last_stable_offsets(settings, settings.topic)  # first: records may arrive meanwhile
    begin = {**ends, **topics.offsets_since(settings, settings.topic, oldest - CLOCK_MARGIN)}

    def arrived() -> bool:
        ends = topics.last_stable_offsets(settings, settings.topic)
        within = {partition: (begin.get(partition, 0), end) for partition, end in ends.items()}
        for message in records.read(settings, settings.topic, within):
            try:
                missing.discard(id_of(message).bytes)
            except (KeyError, ValueError):
                continue  # no event of ours
        begin.update(ends)
        return not missing

    return arrived
