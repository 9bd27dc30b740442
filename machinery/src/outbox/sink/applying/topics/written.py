"""Records of a sink on its target topic: each says which sink has written it, and which record it comes from."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import closing
from datetime import datetime
from typing import NamedTuple

from outbox.base.database import connect
from outbox.base.errors import Failure
from outbox.base.settings import Settings, SinkRole
from outbox.base.wait import WaitTimeoutError
from outbox.kafka import records, topics
from outbox.kafka.records import CLOCK_MARGIN, headers_of
from outbox.sink.decoding.decoder import UUID
from outbox.sink.remembering import positions
from outbox.sink.spec import TargetState

ORIGIN = "origin"
PLACE = re.compile(r"([a-z0-9_-]+) ([A-Za-z0-9._-]+)/([0-9]{1,9})/([0-9]{1,18})")
DECIDED_TIMEOUT_S = 60
RECREATED = "SELECT FROM public.positions WHERE sink = %s AND is_recreated"


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


def read(settings: Settings, sink: str, target: str, since: datetime | None = None) -> Iterator[list[Written]]:
    """The records of a sink on its target topic by now; if ``since`` is given, those that were written after that.

    Waits for transactions that are open. Raises Failure if one does not end.
    """
    try:
        ends = topics.wait_decided(settings, target, DECIDED_TIMEOUT_S)
    except WaitTimeoutError as error:
        remedy = "end the producer that has left it open; nothing is lost meanwhile"
        raise Failure(f"a transaction on topic {target} does not end", remedy, code="topic-silent") from error
    starts = dict.fromkeys(ends, 0)
    if since is not None:
        starts = ends | topics.offsets_since(settings, target, since - CLOCK_MARGIN)
    for messages in records.batches(settings, target, {number: (starts[number], end) for number, end in ends.items()}):
        some = list[Written]()
        for message in messages:
            headers = dict(headers_of(message))
            contents = headers.get(ORIGIN), headers.get("id"), message.key()
            origin_, event_id, key = (bytes(content or b"").decode(errors="replace") for content in contents)
            place = PLACE.fullmatch(origin_)
            if place is not None and place[1] == sink and UUID.fullmatch(event_id):
                some.append(Written(event_id, key, place[2], int(place[3]), int(place[4])))
        yield some


def state(settings: Settings, sink: str, target: str) -> TargetState:
    """How many records of each key a sink has written, as far as its positions go. What is behind them is in flight."""
    with closing(connect(settings, SinkRole.AUDITOR)) as connection, connection, connection.cursor() as cursor:
        reached = positions.read_all(cursor, sink)
        cursor.execute(RECREATED, [sink])
        unread = "one of its topics was created again" if cursor.rowcount else ""
    if not topics.exists(settings, target):
        unread = f"there is no topic {target}"
    elif any(topics.first_offsets(settings, target).values()):
        unread = f"topic {target} has dropped records"
    if unread:
        return TargetState(unread=unread)
    counts = Counter[str]()
    for some in read(settings, sink, target):
        counts.update(one.key for one in some if one.offset < reached.get(one.topic, {}).get(one.partition, 0))

    def lacking(event_ids: Collection[str]) -> Collection[str]:
        found = read(settings, sink, target) if event_ids else ()
        return {*event_ids}.difference(one.event_id for some in found for one in some)

    return TargetState(reached, [(key, count, None) for key, count in counts.items()], lacking)
