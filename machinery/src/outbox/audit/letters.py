"""The dead letters of the sinks: what they have set aside, and what an operator has discarded.

A discarded dead letter is acknowledged: somebody has looked at it and given a reason. Its event is due no more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from decimal import Decimal
from hashlib import blake2b
from itertools import islice
from typing import Any, NamedTuple

from psycopg2 import extensions

from outbox.audit.declared import Declared, EventTopic
from outbox.sink.decoding import dead_records
from outbox.sink.decoding.records import Records
from outbox.sink.remembering import dead_letters
from outbox.sink.rows import stream

NO_REASON = "no reason given"
DECODED_AT_ONCE = 1000
DIGEST_BYTES = 16
KEY_MAX_BYTES = 1000  # shown and compared: a stranger's key may have megabytes
LETTERS = f"""
SELECT sink, identity, status <> 'discarded', topic, partition, "offset", is_event,
       CASE WHEN is_event THEN key ELSE substring(key FOR {KEY_MAX_BYTES}) END,
       CASE WHEN is_event THEN headers END, CASE WHEN is_event THEN value END,
       round(extract(epoch FROM recorded_at) * 1000)::bigint
  FROM public.dead_letters
 WHERE status = 'open'
    OR event_id IS NOT NULL
       AND (status = 'discarded'
            OR status = 'replayed' AND resolution IS DISTINCT FROM '{dead_letters.FILTERED}' AND sink = ANY(%s))
"""  # noqa: S608
REASONS = """
SELECT sink, coalesce(resolution, %s), count(*)
  FROM public.dead_letters WHERE status = 'discarded' GROUP BY 1, 2 ORDER BY 1, 3 DESC, 2
"""
ACKNOWLEDGED = """
SELECT identity FROM public.dead_letters WHERE sink = ANY(%s) GROUP BY 1 HAVING bool_and(status <> 'open')
"""


class TopicOffset(NamedTuple):
    """The place of a record."""

    partition: int
    offset: int

    def __str__(self) -> str:
        return f"partition {self.partition}, offset {self.offset}"


class Letter(NamedTuple):
    """A dead letter that is open, or that is discarded and has an event id."""

    topic: str
    key: str = ""
    is_open: bool = True
    place: TopicOffset | None = None
    """The place of an invalid record: a valid record may have the same event id. None if it stands for the event."""
    is_event: bool = True
    """Whether the event was valid: strategy or projection have refused it."""
    kind: int | None = None
    version: int | None = None
    numbers: tuple[Decimal | None, ...] = ()
    origin: TopicOffset = TopicOffset(0, 0)
    """The place of the record that it was written for, valid or not."""

    def is_of(self, topic: str, place: TopicOffset | None) -> bool:
        """Whether it sets aside the event that is first at this place of a topic, or that is not on the topic."""
        return self.topic == topic and (self.place is None or place is None or self.place == place)


def read(
    connection: extensions.connection, declared: Declared, elsewhere: Collection[str] = ()
) -> dict[str, dict[str, Letter]]:
    """By sink and identity, the letters that are open, and the discarded ones with an event id. An identity is that
    id, or a hash if the record has none.

    Some sinks have their results ``elsewhere``, and a restored result may be older than a replay. So replayed letters
    of these sinks count as open too.
    """
    topics = declared.topic_by_name
    found: dict[str, dict[str, Letter]] = defaultdict(dict)
    letters = stream(connection, LETTERS, [list(elsewhere)])
    while some := [_Stored(*row) for row in islice(letters, DECODED_AT_ONCE)]:
        for row in some:
            place = TopicOffset(row.partition, row.offset)
            key = bytes(row.key or b"")[:KEY_MAX_BYTES].decode(errors="replace")
            found[row.sink][row.identity] = Letter(
                row.topic, key, row.is_open, None if row.is_event else place, row.is_event, origin=place
            )
        for topic in {row.topic for row in some if row.is_event} & topics.keys():
            events = [row for row in some if row.topic == topic and row.is_event]
            for event in _decoded(topics[topic], events):
                sink, event_id = events[event["offset"]].sink, event["event_id"]
                texts = [event[f"n{place}"] for place in range(len(topics[topic].properties))]
                numbers = declared.numbers[event["kind"]].of(texts)
                letter = found[sink][event_id]
                found[sink][event_id] = letter._replace(kind=event["kind"], version=event["version"], numbers=numbers)
    return found


def digest(letters: Mapping[str, Letter], topic: str, before: Mapping[int, int]) -> bytes:
    """A digest of a sink's dead letters for records of a topic below these offsets.

    The digest changes if one of them comes, goes, is discarded, or turns out to hold a valid event.
    """
    found = blake2b(digest_size=DIGEST_BYTES)
    for identity, letter in sorted(letters.items()):
        if letter.topic == topic and letter.origin.offset < before.get(letter.origin.partition, 0):
            found.update(identity.encode() + bytes([letter.is_open, letter.is_event]))
    return found.digest()


def acknowledged(cursor: extensions.cursor, sinks: Collection[str]) -> frozenset[str]:
    """Identities of which these sinks have letters, all closed: discarded, or the event of that id was applied."""
    cursor.execute(ACKNOWLEDGED, [list(sinks)])
    return frozenset(identity for (identity,) in cursor)


def has_event_id(identity: str) -> bool:
    """Whether the identity of a dead letter is an event's id, and not a hash."""
    return not identity.startswith("sha256:")


class _Stored(NamedTuple):
    """A letter as it is stored; key, headers and value of a valid event are whole."""

    sink: str
    identity: str
    is_open: bool
    topic: str
    partition: int
    offset: int
    is_event: bool
    key: memoryview | None
    headers: list[dict[str, Any]] | None
    value: memoryview | None
    recorded_ms: int


def _decoded(topic: EventTopic, events: Sequence[_Stored]) -> list[dict[str, Any]]:
    """The events of letters as they are decoded today; those that are no events are left out."""
    records = Records(
        keys=[dead_records.content(letter.key) for letter in events],
        headers=[dead_records.headers(letter.headers or ()) for letter in events],
        values=[dead_records.content(letter.value) for letter in events],
        recorded_ms=[letter.recorded_ms for letter in events],
        partitions=[0] * len(events),
        offsets=range(len(events)),  # so that each finds its letter
    )
    from outbox.audit.topic_log import delivered

    found: list[dict[str, Any]] = delivered(topic, records).to_pylist()
    return found
