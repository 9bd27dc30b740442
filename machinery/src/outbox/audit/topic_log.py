"""The records of the declared topics: valid events, and records that break the contract.

Decoding is most of the work of a check, so several processes read a large topic.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import NamedTuple

import pyarrow as pa

from outbox.audit.declared import EventTopic
from outbox.audit.store import Store
from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.kafka import records, topics
from outbox.kafka.records import Within
from outbox.sink.comparison_files import NUMBERS
from outbox.sink.decoding.dead_records import identity
from outbox.sink.decoding.records import Records

PART_OFFSETS = 250_000  # some seconds of work
PART_MAX_BYTES = 16 * 2**20  # of rows; more only if one answer of the brokers has more
PROCESSES_MAX = 4  # some 300 MB each
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

Part = tuple[int, Within]  # the number of a topic, and offsets of it


class TopicPart(NamedTuple):
    """Records of the topic with this number."""

    topic: int
    records: int
    delivered: pa.Table
    refused: pa.Table


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

    def read_on(self, settings: Settings, progress: Callable[[str], None]) -> None:
        """Read from where the last call stopped to the last stable offsets.

        Transaction markers and aborted records are not counted. Raises Failure if a topic was recreated meanwhile, or
        if Kafka is unavailable.
        """
        within = {topic.number: self._new(settings, topic) for topic in self._topics}
        offsets = self.records + sum(map(_size, within.values()))
        for part in read_parts(self._topics, settings, within):
            self._add(part)
            progress(f"read {self.records:,} records of up to {offsets:,}")
        for topic in self._topics:
            end = self.ends[topic.number]
            end.next_offsets = {number: last for number, (_, last) in within[topic.number].items()}
            dropped_until = None if end.is_whole else records.dropped_until(settings, topic.name)
            end.dropped_until_ms = 0 if dropped_until is None else int(dropped_until.timestamp() * 1000)

    def add(self, topic: int, read: Records) -> None:
        """Add records of the topic with this number."""
        self._add(_decoded(self._topics[topic], read))

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

    def _add(self, part: TopicPart) -> None:
        self.ends[part.topic].records += part.records
        if part.delivered.num_rows:
            numbers = ", ".join(part.delivered.column_names[len(DELIVERED) + len(PLACE) :])
            self.store.run(ADD_DELIVERED.format(topic=part.topic, numbers=numbers), events=part.delivered)
        if part.refused.num_rows:
            self.store.run(ADD_REFUSED.format(topic=part.topic), dead=part.refused)


# Decoding ----------------------------------------------------------------------------------------------------------


def delivered(topic: EventTopic, read: Records) -> pa.Table:
    """The events among records of a topic: columns of `DELIVERED` and `PLACE`, then ``n0``, ``n1``, … with the numbers
    of the topic's properties, as texts.
    """
    return _table(topic, topic.decoder.decode(read).rows)


def _decoded(topic: EventTopic, read: Records) -> TopicPart:
    decoded = topic.decoder.decode(read)
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
    return TopicPart(topic.number, len(read), _table(topic, decoded.rows), pa.Table.from_pylist(refused, REFUSED))


def _table(topic: EventTopic, rows: Mapping[str, pa.Table]) -> pa.Table:
    schema = pa.schema({**DELIVERED, **PLACE, **{f"n{place}": pa.string() for place in range(len(topic.properties))}})
    tables = [_of_kind(topic, name, table, schema) for name, table in rows.items()]
    return pa.concat_tables(tables) if tables else schema.empty_table()


def _of_kind(topic: EventTopic, name: str, rows: pa.Table, schema: pa.Schema) -> pa.Table:
    decoder = topic.decoder
    numeric = {column.name for column in decoder.types[name] if column.type in NUMBERS}
    columns = [
        pa.repeat(topic.kinds[name], rows.num_rows),
        rows["event_id"],
        rows[decoder.key],
        pa.nulls(rows.num_rows) if decoder.version is None else rows[decoder.version],
        *(rows[place] for place in PLACE),
        *(rows[one] if one in numeric else pa.nulls(rows.num_rows) for one in topic.properties),
    ]
    cast = [column.cast(type_) for column, type_ in zip(columns, schema.types, strict=True)]
    return pa.table(cast, schema)


# Reading -----------------------------------------------------------------------------------------------------------


def read_parts(declared: Sequence[EventTopic], settings: Settings, within: Mapping[int, Within]) -> Iterator[TopicPart]:
    """The committed records within these offsets of the topics with these numbers, in parts that fit into memory.

    Small topics are read by this process. For large ones `multiprocessing` starts a process for each core, up to four.
    When this process dies, they end after the part that they are reading. Raises Failure if Kafka is unavailable, or if
    one of them dies.
    """
    parts = list(_parts(within))
    count = min(len(parts), os.cpu_count() or 1, PROCESSES_MAX)
    if count <= 1 or sum(map(_size, within.values())) <= PART_OFFSETS:
        yield from _read(declared, settings, parts)
        return
    with ExitStack() as processes:
        waiting = [
            processes.enter_context(_process(declared, settings, parts[number::count])) for number in range(count)
        ]
        while waiting:
            for connection in wait(waiting):
                part = _received(connection)  # type: ignore[arg-type]
                if part is None:
                    waiting.remove(connection)  # type: ignore[arg-type]
                else:
                    yield part


def _parts(within: Mapping[int, Within]) -> Iterator[Part]:
    for topic, of_topic in within.items():
        if _size(of_topic) > PART_OFFSETS:
            for partition, (first, last) in of_topic.items():
                for begin in range(first, last, PART_OFFSETS):
                    yield topic, {partition: (begin, min(begin + PART_OFFSETS, last))}
        elif _size(of_topic):
            yield topic, of_topic


def _size(within: Within) -> int:
    return sum(last - first for first, last in within.values())


def _read(declared: Sequence[EventTopic], settings: Settings, parts: Sequence[Part]) -> Iterator[TopicPart]:
    for number, within in parts:
        topic = declared[number]
        some, size = list[TopicPart](), 0
        for messages in records.batches(settings, topic.name, within):
            some.append(_decoded(topic, Records.of_messages(messages)))
            size += some[-1].delivered.nbytes + some[-1].refused.nbytes
            if size > PART_MAX_BYTES:
                yield _together(some)
                some, size = [], 0
        if some:
            yield _together(some)


def _together(parts: Sequence[TopicPart]) -> TopicPart:
    return TopicPart(
        parts[0].topic,
        sum(part.records for part in parts),
        pa.concat_tables([part.delivered for part in parts]),
        pa.concat_tables([part.refused for part in parts]),
    )


@contextmanager
def _process(declared: Sequence[EventTopic], settings: Settings, parts: Sequence[Part]) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")  # a fork would share the clients of Kafka
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(theirs, declared, settings, parts), daemon=True)
    with ours:
        with theirs:
            process.start()
        try:
            yield ours
        finally:
            process.kill()
            process.join()


def _send(connection: Connection, declared: Sequence[EventTopic], settings: Settings, parts: Sequence[Part]) -> None:
    """Send parts to the process that started this one, then None. That process may be gone at any time."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    gc.freeze()  # as in outbox.commands.check
    with suppress(BrokenPipeError):
        try:
            for part in _read(declared, settings, parts):
                connection.send(part)
            connection.send(None)
        except Failure as failure:
            connection.send(failure)


def _received(connection: Connection) -> TopicPart | None:
    try:
        received: TopicPart | Failure | None = connection.recv()
    except (EOFError, OSError):
        raise Failure(
            "a process of the check was killed",
            f"was memory short? {PROCESSES_MAX} of them take some 1.5 GB together; then run the check again",
            code="process-ended",
        ) from None
    if isinstance(received, Failure):
        raise received
    return received
