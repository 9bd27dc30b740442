"""The records of the declared topics: valid events, and records that break the contract."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from outbox.audit.declared import EventTopic
from outbox.audit.store import Store
from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.base.terminal import Progress
from outbox.kafka import records, topics
from outbox.kafka.records import Within
from outbox.sink.comparison_files import NUMBERS
from outbox.sink.decoding.dead_records import identity
from outbox.sink.decoding.records import Records, Rows
from outbox.sink.decoding.values import Columns

DECODED_AT_ONCE = 10_000  # records, or as many as `outbox.kafka.records` has in memory
DELIVERED = {"kind": pa.uint16(), "event_id": pa.string(), "key": pa.string(), "version": pa.int64()}
PLACE = {"partition": pa.int32(), "offset": pa.int64()}
REFUSED = pa.schema(
    {"identity": pa.string(), "key": pa.string(), **PLACE, "reason": pa.string(), "detail": pa.string()}
)
ADD_DELIVERED = """
INSERT INTO delivered
SELECT {topic}, kind, masked(event_id), key, version, partition, "offset", [{numbers}]::VARCHAR[] FROM events
"""
ADD_REFUSED = """
INSERT INTO refused
SELECT {topic}, identity, masked(TRY_CAST(identity AS UUID)), key, partition, "offset", reason, detail FROM dead
"""


@dataclass
class TopicEnd:
    """How far a topic was read."""

    topic_id: str | None = None
    next_offsets: dict[int, int] = field(default_factory=dict)
    has_gap: bool = False  # the topic has dropped records that were not read
    is_whole: bool = True  # the topic has dropped nothing yet
    dropped_until_ms: int = 0  # the topic may have dropped records that are not younger
    records: int = 0


class TopicLogs:
    """The committed records of the topics, as far as they were read. Memory does not grow with their number."""

    def __init__(self, declared: Sequence[EventTopic], ends: Mapping[str, TopicEnd] | None = None) -> None:
        """Begin where the topics do, or at the ``ends`` of what was read before."""
        self.ends = [(ends or {}).get(topic.name) or TopicEnd() for topic in declared]
        self.store = Store()
        self._topics = declared

    def close(self) -> None:
        """Delete the temporary files."""
        self.store.close()

    @property
    def records(self) -> int:
        """How many were read, of all topics."""
        return sum(end.records for end in self.ends)

    def read_on(self, settings: Settings, progress: Progress) -> None:
        """Read from where the last call stopped to the last stable offsets.

        Transaction markers and aborted records are not counted. Raises Failure if a topic was recreated meanwhile, or
        if Kafka is unavailable.
        """
        within = {topic.number: self._new(settings, topic) for topic in self._topics}
        offsets = self.records + sum(last - first for one in within.values() for first, last in one.values())
        for topic in self._topics:
            for messages in records.batches(settings, topic.name, within[topic.number], at_least=DECODED_AT_ONCE):
                self.add(topic.number, Records.of_messages(messages))
                progress(f"read {self.records:,} records of up to {offsets:,}")
            end = self.ends[topic.number]
            end.next_offsets = {number: last for number, (_, last) in within[topic.number].items()}
            dropped_until = None if end.is_whole else records.dropped_until(settings, topic.name)
            end.dropped_until_ms = 0 if dropped_until is None else int(dropped_until.timestamp() * 1000)

    def add(self, number: int, read: Records) -> None:
        """Add records of the topic with this number."""
        topic = self._topics[number]
        decoded = topic.decoder.decode(read)
        self.ends[number].records += len(read)
        events = delivered(topic, decoded.rows)
        if events.num_rows:
            numbers = ", ".join(events.column_names[len(DELIVERED) + len(PLACE) :])
            self.store.run(ADD_DELIVERED.format(topic=number, numbers=numbers), events=events)
        refused = [
            {
                "identity": identity(one.record, one.event_id),
                "key": (one.record.key or b"").decode(errors="replace"),
                "partition": one.partition,
                "offset": one.offset,
                **one.rejection._asdict(),
            }
            for one in decoded.dead
        ]
        if refused:
            self.store.run(ADD_REFUSED.format(topic=number), dead=pa.Table.from_pylist(refused, REFUSED))

    def _new(self, settings: Settings, topic: EventTopic) -> Within:
        """The offsets of a topic that were not read."""
        end, name = self.ends[topic.number], topic.name
        topic_id = topics.describe(settings, name).id
        if end.topic_id not in (None, topic_id):
            raise Failure(f"topic {name} was recreated during the check", "run the check again", code="topic-recreated")
        end.topic_id = topic_id
        watermarks = topics.watermarks(settings, name)
        end.has_gap |= any(first > end.next_offsets.get(number, first) for number, (first, _) in watermarks.items())
        end.is_whole = not any(first for first, _ in watermarks.values())
        return {
            number: (max(first, end.next_offsets.get(number, first)), last)
            for number, (first, last) in watermarks.items()
        }


def delivered(topic: EventTopic, rows: Rows) -> pa.Table:
    """Decoded events of a topic: columns of `DELIVERED` and `PLACE`, then ``n0``, ``n1``, … with the numbers of the
    topic's properties, as texts.
    """
    schema = pa.schema({**DELIVERED, **PLACE, **{f"n{place}": pa.string() for place in range(len(topic.properties))}})
    tables = [_of_kind(topic, name, columns, schema) for name, columns in rows.items()]
    return pa.concat_tables(tables) if tables else schema.empty_table()


def _of_kind(topic: EventTopic, name: str, rows: Columns, schema: pa.Schema) -> pa.Table:
    decoder, nothing = topic.decoder, [None] * len(rows["offset"])
    numeric = {column.name for column in decoder.types[name] if column.type in NUMBERS}
    columns = [
        [topic.kinds[name]] * len(nothing),
        rows["event_id"],
        rows[decoder.key],
        nothing if decoder.version is None else rows[decoder.version],
        *(rows[place] for place in PLACE),
        *(rows[one] if one in numeric else nothing for one in topic.properties),
    ]
    # Keys and numbers have types of their own in each event: here they are texts.
    cast = [pa.array(column).cast(type_) for column, type_ in zip(columns, schema.types, strict=True)]
    return pa.table(cast, schema)
