"""The dead letters of the sinks: what they have set aside, and what an operator has discarded.

A discarded dead letter is acknowledged: somebody has looked at it and given a reason. Its event is due no more.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from decimal import Decimal
from hashlib import blake2b
from typing import NamedTuple

from psycopg2 import extensions, sql

from outbox.audit.declared import Declared
from outbox.audit.source import Numbers, property_names, rows, version_of
from outbox.audit.topic_part import TopicOffset, identity_bytes

NO_REASON = "no reason given"
ROW_COLUMNS = 8  # of `_Row`
DIGEST_BYTES = 16
KEY_MAX_BYTES = 1000  # shown and compared: a stranger's key may have megabytes
# A column's name is followed by its type where the events of a sink have it in two types (outbox/sink/layout.py).
COLUMN = ", coalesce(event ->> {name}, event ->> {bigint}, event ->> {numeric})"
LETTERS = """
SELECT sink, event_id, status <> 'discarded', topic, partition, "offset", event IS NOT NULL, event_type, schema_version,
       substring(key FOR {key_bytes}){columns}
  FROM dead_letters
 WHERE event_id IS NOT NULL
   AND (status IN ('open', 'discarded') OR (status = 'replayed' AND sink = ANY({elsewhere}::text[])))
"""
REASONS = """
SELECT sink, coalesce(resolution, %s), count(*)
  FROM dead_letters WHERE status = 'discarded' GROUP BY 1, 2 ORDER BY 1, 3 DESC, 2
"""
ACKNOWLEDGED = """
SELECT DISTINCT identity FROM dead_letters AS letter
 WHERE status = 'discarded' AND sink = ANY(%(sinks)s)
   AND NOT EXISTS (SELECT FROM dead_letters AS other
                    WHERE other.identity = letter.identity AND other.status = 'open' AND other.sink = ANY(%(sinks)s))
"""


class Letter(NamedTuple):
    """A dead letter that is open or discarded, and has an event id."""

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
        """Whether it sets aside the event that is first at this place of a topic, or that is not on the topic.

        An invalid record that was discarded keeps a valid record behind it from being applied, as the sink sees it.
        """
        if self.topic != topic:
            return False
        if self.place is None or place is None or self.place == place:
            return True
        return not self.is_open and self.place.partition == place.partition and self.place.offset < place.offset


def read(
    connection: extensions.connection, declared: Declared, elsewhere: Collection[str] = ()
) -> dict[str, dict[bytes, Letter]]:
    """By sink and event id, the letters that are open or discarded.

    Those of sinks whose result is ``elsewhere`` count as open, too, after a replay: the result may be older.
    """
    letters = _Letters(declared)
    columns = [
        sql.SQL(COLUMN).format(
            name=sql.Literal(name), bigint=sql.Literal(f"{name}:bigint"), numeric=sql.Literal(f"{name}:numeric")
        )
        for name in letters.names
    ]
    query = sql.SQL(LETTERS).format(
        key_bytes=sql.Literal(KEY_MAX_BYTES), columns=sql.Composed(columns), elsewhere=sql.Literal(list(elsewhere))
    )
    found: dict[str, dict[bytes, Letter]] = defaultdict(dict)
    for sink, event_id, *row in rows(connection, query):
        found[sink][uuid.UUID(event_id).bytes] = letters.of(_Row(*row[:ROW_COLUMNS]), row[ROW_COLUMNS:])
    return found


def digest(letters: Mapping[bytes, Letter], topic: str, before: Mapping[int, int]) -> bytes:
    """Of a sink's letters those that were written for records before these offsets of a topic, as one short value.

    It differs if one of them comes, goes, is discarded, or turns out to hold a valid event.
    """
    found = blake2b(digest_size=DIGEST_BYTES)
    for event_id, letter in sorted(letters.items()):
        if letter.topic == topic and letter.origin.offset < before.get(letter.origin.partition, 0):
            found.update(event_id + bytes([letter.is_open, letter.is_event]))
    return found.digest()


def reasons(cursor: extensions.cursor) -> dict[str, dict[str, int]]:
    """By sink, why letters were discarded, with their numbers."""
    cursor.execute(REASONS, [NO_REASON])
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for sink, reason, count in cursor:
        found[sink][reason] = count
    return found


def acknowledged(cursor: extensions.cursor, sinks: Collection[str]) -> frozenset[bytes]:
    """The identities of the letters that one of these sinks has discarded, and that none of them has open."""
    cursor.execute(ACKNOWLEDGED, {"sinks": list(sinks)})
    return frozenset(identity_bytes(identity) for (identity,) in cursor)


class _Row(NamedTuple):
    """What a letter says beside the properties of its event."""

    is_open: bool
    topic: str
    partition: int
    offset: int
    is_event: bool
    event: str | None  # its name; None in letters of earlier versions
    schema_version: int | None
    key: memoryview | None


class _Letters:
    """Makes letters of rows."""

    def __init__(self, declared: Declared) -> None:
        self.names = property_names(declared.topics)
        self._topics = {topic.name: topic for topic in declared.topics}
        self._kinds = {(kind.event, kind.schema.version): place for place, kind in enumerate(declared.kinds)}
        # The columns of an event are those of the version in its letter. If a newer one is declared by now, nobody
        # knows which numbers the event has in that.
        self._numbers = [
            Numbers(self._topics[kind.topic], kind) if kind.upcaster is None else None for kind in declared.kinds
        ]

    def of(self, row: _Row, values: Sequence[str | None]) -> Letter:
        """The letter of a row. Of an event that is not declared any more, neither version nor numbers are known."""
        origin = TopicOffset(row.partition, row.offset)
        place = None if row.is_event else origin
        key = bytes(row.key or b"").decode(errors="replace")
        letter = Letter(row.topic, key, row.is_open, place, row.is_event, origin=origin)
        known = self._topics.get(row.topic)
        if known is None or not row.is_event:
            return letter
        texts = dict(zip(self.names, values, strict=True))
        # A sink that has asked for one version calls the event by the name of that version.
        kind = self._kinds.get((str(row.event).removesuffix(f".v{row.schema_version}"), row.schema_version or 0))
        numbers = None if kind is None else self._numbers[kind]
        return letter._replace(
            kind=kind,
            version=version_of(texts.get(known.decoder.version or "")),
            numbers=(None,) * len(known.properties) if numbers is None else numbers.of(texts),
        )
