"""Which events of the outbox table have arrived on their topics, by their ids alone.

An event is looked up on the topic to which its aggregate type is routed. If it is not there, other topics are read
too, because the aggregate may have been moved. A record that breaks the contract has arrived too: the relay has done
its part.

The events are copied into a temporary file, and looked up `LOOK_UP_EVENTS` at once. So an outbox of any size needs
memory for these only, and no snapshot of the database stays open while topics are read.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import IO, NamedTuple
from uuid import UUID

from confluent_kafka import Message
from psycopg2 import extensions

from outbox.base.database import connected
from outbox.base.settings import Settings, SourceRole
from outbox.base.wait import WaitTimeoutError, wait_for
from outbox.events.catalog import TOPIC
from outbox.kafka import records, topics
from outbox.kafka.records import headers_of
from outbox.relay import connectors

LOOK_UP_EVENTS = 250_000  # at once; this bounds the memory: about 100 MiB
POLL_S = 0.5

COPY = """
COPY (SELECT id, extract(epoch FROM occurred_at), aggregatetype FROM public.outbox {where} ORDER BY id) TO STDOUT
"""


class Written(NamedTuple):
    """An event of the outbox table: the topic to which it is routed, and its time in seconds since 1970."""

    topic: str
    at_s: float


Events = Mapping[str, Written]  # by id


def header_id(message: Message) -> UUID:
    """The id of a record's event. Raises KeyError or ValueError if it has none."""
    content = dict(headers_of(message))["id"]
    if content is None:
        raise ValueError("header id is null")
    return UUID(content.decode())


def copy(cursor: extensions.cursor, file: IO[bytes], where: str = "") -> None:
    """Write the events of the outbox table into a file, in the order of their ids. ``where`` chooses some of them."""
    cursor.copy_expert(COPY.format(where=where), file)


def chunks(settings: Settings, file: IO[bytes]) -> Iterator[Events]:
    """The events in a file that `copy` has written, `LOOK_UP_EVENTS` at once."""
    config = connectors.load(settings).config
    routes: dict[str, str] = {}
    file.seek(0)
    while lines := list(itertools.islice(file, LOOK_UP_EVENTS)):
        events: dict[str, Written] = {}
        for line in lines:
            event_id, seconds, aggregate_type = line.decode().rstrip("\n").split("\t", 2)
            topic = routes.get(aggregate_type) or connectors.topic_of(config, aggregate_type)
            events[event_id] = Written(routes.setdefault(aggregate_type, topic), float(seconds))
        yield events


def missing(settings: Settings, events: Events, others: Callable[[], Collection[str]]) -> Events:
    """The events that are neither on the topics to which they are routed nor, if some are left, on other topics.

    Each topic is read from where the oldest of its events may have arrived until all are found, at most up to its last
    stable offsets.
    """
    left = dict(events)
    for topic in {event.topic for event in events.values()}:
        _find(settings, topic, left, {event_id for event_id, event in left.items() if event.topic == topic})
    for topic in others() if left else ():
        _find(settings, topic, left, {event_id for event_id, event in left.items() if event.topic != topic})
    return left


def all_arrive(settings: Settings, names: Sequence[str], timeout_s: float) -> bool:
    """Whether every event that the outbox holds now is on its topic, or on one of these, within ``timeout_s``.

    Raises Failure if database or Kafka is unavailable.
    """
    with tempfile.TemporaryFile() as file:
        with (
            connected(settings, SourceRole.AUDITOR, "reading the outbox") as connection,
            connection.cursor() as cursor,
        ):
            copy(cursor, file)
        return all(_arrive(settings, events, names, timeout_s) for events in chunks(settings, file))


def _arrive(settings: Settings, events: Events, names: Sequence[str], timeout_s: float) -> bool:
    left = events

    def arrived() -> bool:
        nonlocal left
        left = missing(settings, left, lambda: names)
        return not left

    try:
        return wait_for("the outbox to be on its topics", arrived, timeout_s=timeout_s, poll_s=POLL_S)
    except WaitTimeoutError:
        return False


def _find(settings: Settings, topic: str, left: dict[str, Written], sought: set[str]) -> None:
    """Look up some of the events that are left on a topic, and remove what it has."""
    # An undeclared aggregate type may be any text, which the brokers would refuse as a topic.
    if not sought or not TOPIC.fullmatch(topic) or not topics.exists(settings, topic):
        return
    # The topic's timestamps are those of arrival, so no event is before its own time.
    oldest = datetime.fromtimestamp(min(left[event_id].at_s for event_id in sought), UTC)
    begin = topics.offsets_since(settings, topic, oldest - records.CLOCK_MARGIN)
    end = topics.last_stable_offsets(settings, topic)
    within = {partition: (begin[partition], end[partition]) for partition in begin.keys() & end.keys()}
    for message in records.read(settings, topic, within):
        try:
            event_id = str(header_id(message))
        except (KeyError, ValueError):
            continue  # no event
        if event_id in sought:
            sought.remove(event_id)
            del left[event_id]
        if not sought:
            break
