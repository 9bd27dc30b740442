"""Kafka records: as they were read, and decoded."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.base.trace import SampledEvents
from outbox.events.schema import Rejection
from outbox.kafka.spec import Header
from outbox.sink.decoding.values import Columns

if TYPE_CHECKING:  # below, too: `outbox events` imports this module and reads no topic
    from confluent_kafka import Message

    from outbox.kafka import records

T = TypeVar("T")
Place = tuple[int, int]  # partition and offset
Rows = Mapping[str, Columns]  # by the name of the event: its place, and its columns

RUN_GAP = 1_000  # offsets: it is faster to read over a smaller gap than to seek


class Record(NamedTuple):
    """A record as Kafka has it, with the headers that `outbox.kafka.records` can read.

    ``recorded_ms`` is its timestamp, in milliseconds since 1970.
    """

    key: bytes | None
    headers: Sequence[Header]
    value: bytes | None
    recorded_ms: int


Fetch = Callable[[str, Collection[Place]], Iterable[tuple[Place, Record]]]
"""Reads the records at these places of a topic. Raises Failure `events-lost` if one of them is gone."""


@dataclass(frozen=True)
class Records:
    """Records of one topic as they were read: what is in `Record` column by column, and the place of each."""

    keys: Sequence[bytes | None]
    headers: Sequence[Sequence[Header]]
    values: Sequence[bytes | None]
    recorded_ms: Sequence[int]
    partitions: Sequence[int]
    offsets: Sequence[int]

    @classmethod
    def of_messages(cls, messages: Sequence[Message]) -> Records:
        """The records of a client."""
        from confluent_kafka import Message

        from outbox.kafka.records import headers_of

        def each(method: Callable[[Message], Any]) -> list[Any]:
            return list(map(method, messages))

        return cls(
            keys=each(Message.key),
            headers=each(headers_of),
            values=each(Message.value),
            recorded_ms=[at_ms for _, at_ms in each(Message.timestamp)],
            partitions=each(Message.partition),
            offsets=each(Message.offset),
        )

    def __len__(self) -> int:
        return len(self.offsets)

    def __iter__(self) -> Iterator[tuple[Record, int, int]]:
        """Each record with its partition and offset."""
        records = map(Record, self.keys, self.headers, self.values, self.recorded_ms)
        return zip(records, self.partitions, self.offsets, strict=True)

    def at(self, numbers: Sequence[int]) -> Records:
        """The records with these numbers, counted from 0."""
        return Records(*(values_at(numbers, column) for column in vars(self).values()))

    def parts(self, size: int) -> Iterator[Records]:
        """The records in parts of so many at most."""
        columns = tuple(vars(self).values())
        for begin in range(0, len(self), size):
            yield Records(*(column[begin : begin + size] for column in columns))


class DeadRecord(NamedTuple):
    """A record that is no event, with its place and the reason. ``event_id`` is its id if that is a UUID."""

    partition: int
    offset: int
    record: Record
    event_id: str | None
    rejection: Rejection


class Decoded(NamedTuple):
    """Decoded records: rows of the events, and the records that are no events. ``skipped`` counts, by name, the events
    that the sink has not asked for. ``sampled`` are the sampled ones of the others, if somebody wants to know.
    """

    rows: Rows
    dead: Sequence[DeadRecord]
    skipped: Mapping[str, int] = {}
    sampled: SampledEvents = SampledEvents()

    @classmethod
    def together(cls, parts: Sequence[Decoded]) -> Decoded:
        """The rows and records of all parts."""
        rows: dict[str, dict[str, list[Any]]] = {}
        for part in parts:
            for name, columns in part.rows.items():
                of_event = rows.setdefault(name, {column: [] for column in columns})
                for column, values in columns.items():
                    of_event[column] += values
        return cls(
            rows=rows,
            dead=[one for part in parts for one in part.dead],
            skipped=summed(part.skipped for part in parts),
            sampled=SampledEvents.together(part.sampled for part in parts),
        )


def event_ids(rows: Rows) -> list[str]:
    """The ids of all rows."""
    return [event_id for columns in rows.values() for event_id in columns["event_id"]]


def summed(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Counts by name, added up."""
    return dict(sum(map(Counter, counts), Counter[str]()))


def fetcher(settings: Settings) -> Fetch:
    """Fetch from the topics of Kafka."""
    from outbox.kafka import records

    def fetch(topic: str, places: Collection[Place]) -> Iterator[tuple[Place, Record]]:
        missing = set(places)
        for within in _runs(places):
            for messages in records.batches(settings, topic, within, require_all=True):
                for record, partition, offset in Records.of_messages(messages):
                    if (partition, offset) in missing:
                        missing.remove((partition, offset))
                        yield (partition, offset), record
        if missing:
            partition, offset = min(missing)
            raise Failure(
                f"topic {topic} no longer has offset {offset} of partition {partition}, which was read a moment ago",
                "`outbox check` shows what is missing",
                code="events-lost",
            )

    return fetch


def _runs(places: Collection[Place]) -> Iterator[records.Within]:
    """Ranges of offsets that cover these places: at most one range of a partition at a time."""
    runs = defaultdict[int, list[list[int]]](list)
    for partition, offset in sorted(places):
        of_partition = runs[partition]
        if of_partition and offset - of_partition[-1][1] < RUN_GAP:
            of_partition[-1][1] = offset + 1
        else:
            of_partition.append([offset, offset + 1])
    while runs:
        yield {partition: (run[0][0], run[0][1]) for partition, run in runs.items()}
        runs = defaultdict(list, {partition: run[1:] for partition, run in runs.items() if run[1:]})


def values_at(numbers: Sequence[int], column: Sequence[T]) -> Sequence[T]:
    """The values with these numbers, counted from 0, by one call in C."""
    return itemgetter(*numbers)(column) if len(numbers) > 1 else [column[number] for number in numbers]
