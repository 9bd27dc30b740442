"""What a sink has written to its target topic: each record says which sink, and which record it comes from."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from typing import NamedTuple

from outbox.base.database import connect
from outbox.base.errors import Failure
from outbox.base.settings import Settings, SinkRole
from outbox.base.wait import WaitTimeoutError
from outbox.kafka import records, topics
from outbox.kafka.records import Within, headers_of
from outbox.sink.remembering import positions
from outbox.sink.spec import TargetState

ORIGIN = "origin"
PLACE = re.compile(
    r"(?P<sink>[a-z0-9_-]+) (?P<topic>[A-Za-z0-9._-]+)/(?P<partition>\d{1,9})/(?P<offset>\d{1,18})", re.ASCII
)
DECIDED_TIMEOUT_S = 60  # for transactions of others on the topic, that are open
RECREATED = "SELECT topic FROM public.positions WHERE sink = %s AND is_recreated LIMIT 1"


class Written(NamedTuple):
    """A record that a sink has written, and the place of the event on the topic that the sink reads."""

    event_id: str
    key: str
    topic: str
    partition: int
    offset: int


def origin(sink: str, topic: str, partition: int, offset: int) -> bytes:
    """The header that says where a record comes from."""
    return f"{sink} {topic}/{partition}/{offset}".encode()


def read(settings: Settings, sink: str, target: str, behind: Mapping[int, int]) -> Iterator[list[Written]]:
    """What a sink has written to its target topic by now, from these offsets on; from the beginning of other
    partitions. Waits for transactions that are open.
    """
    try:
        ends = topics.wait_decided(settings, target, DECIDED_TIMEOUT_S)
    except WaitTimeoutError as error:
        remedy = "end the producer that has left it open; nothing is lost meanwhile"
        raise Failure(f"a transaction on topic {target} does not end", remedy, code="topic-silent") from error
    within: Within = {number: (behind.get(number, 0), end) for number, end in ends.items()}
    for messages in records.batches(settings, target, within):
        found = list[Written]()
        for message in messages:
            headers = dict(headers_of(message))
            origin_ = PLACE.fullmatch((headers.get(ORIGIN) or b"").decode(errors="replace"))
            if origin_ is not None and origin_["sink"] == sink:
                event_id, key = ((text or b"").decode(errors="replace") for text in (headers.get("id"), message.key()))
                place = origin_["topic"], int(origin_["partition"]), int(origin_["offset"])
                found.append(Written(event_id, key, *place))
        yield found


def state(settings: Settings, sink: str, target: str) -> TargetState:
    """How many records of each key a sink has written, as far as the positions in its database go: what it has written
    beyond them is in flight.
    """
    with closing(connect(settings, SinkRole.AUDITOR)) as connection, connection, connection.cursor() as cursor:
        reached = positions.read_all(cursor, sink)
        cursor.execute(RECREATED, [sink])
        for (topic,) in cursor.fetchall():
            return TargetState(unread=f"topic {topic} was created again: it does not have all that {target} has")
    if not topics.exists(settings, target):
        return TargetState(unread=f"there is no topic {target}")
    if any(topics.first_offsets(settings, target).values()):
        return TargetState(unread=f"topic {target} has dropped records")
    counts = Counter[str]()
    for some in read(settings, sink, target, {}):
        counts.update(one.key for one in some if one.offset < reached.get(one.topic, {}).get(one.partition, 0))

    def lacking(event_ids: Collection[str]) -> Collection[str]:
        found = read(settings, sink, target, {}) if event_ids else ()
        return {*event_ids} - {one.event_id for some in found for one in some if one.event_id in event_ids}

    return TargetState(reached, [(key, count, None) for key, count in counts.items()], lacking)
