"""Records of a Kafka topic: ranges of them, how they are read, and their headers."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import accumulate, chain
from operator import methodcaller
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.base.wait import timeout_scale
from outbox.kafka import topics
from outbox.kafka.clients import consumer
from outbox.kafka.spec import Header

# More at once are no faster, and may not fit into memory.
BATCH_RECORDS = 1_000
BATCH_BYTES = 4 << 20
HEADER_BYTES = 100  # of a header's objects in Python: a record may have 100,000 empty ones
POLL_S = 0.01  # a range that ends with a transaction's marker is known to be read after the next poll
SILENCE_TIMEOUT_S = 30.0
CLOCK_MARGIN = timedelta(minutes=10)  # how far the clocks of source database and brokers may differ
Within = Mapping[int, tuple[int, int]]  # by partition, the first offset and the last one, which is excluded

# confluent-kafka returns a list with gaps and raises an error at once. A call in C notices that always; one in Python
# may not, once the interpreter has optimised it for being called often, and the process dies at the first gap.
HEADERS = methodcaller("headers")


@dataclass(frozen=True)
class Part:
    """A range of offsets of a topic: by partition the first one, and the one after the last."""

    topic: str
    start: Mapping[int, int]
    end: Mapping[int, int]

    @property
    def count(self) -> int:
        """How many offsets it has; markers and aborted records take some."""
        return sum(self._sizes)

    @property
    def _sizes(self) -> Sequence[int]:
        return [end - self.start[partition] for partition, end in self.end.items()]

    @property
    def within(self) -> Within:
        return {partition: (self.start[partition], self.end[partition]) for partition in self.end}

    def in_parts(self, records_max: int) -> Sequence[Part]:
        """Parts of at most so many offsets, one after the other; none if it has no offsets."""
        return self.divided(math.ceil(self.count / records_max)) if self.count else []

    def divided(self, count: int) -> Sequence[Part]:
        """So many parts, one after the other: their sizes differ by one offset at most, and each has about the same
        share of every partition.
        """
        parts, rest = list[Part](), self
        for left in range(count, 0, -1):
            first = rest.first(math.ceil(rest.count / left))
            parts.append(first)
            rest = rest.behind(first.end)
        return parts

    def first(self, count: int) -> Part:
        """The first so many offsets."""
        cut, before = dict[int, int](), 0
        for partition, until in zip(self.end, accumulate(self._sizes), strict=True):
            share = until * count // (self.count or 1)  # of this partition and those before it
            cut[partition] = self.start[partition] + share - before
            before = share
        return Part(self.topic, self.start, cut)

    def behind(self, reached: Mapping[int, int]) -> Part:
        return Part(self.topic, reached, self.end)


def read(settings: Settings, name: str, within: Within) -> Iterator[Message]:
    """Every committed record of a topic within these offsets.

    Records of one partition come in order. Transaction markers and aborted records are left out, and so is what the
    topic drops meanwhile. Raises Failure if it sends nothing of them for a while before the end is reached.
    """
    for batch in batches(settings, name, within):
        yield from batch


def batches(
    settings: Settings, name: str, within: Within, *, at_least: int = 1, require_all: bool = False
) -> Generator[Sequence[Message], None, None]:
    """Batches of the records that `read` returns, within bounds of number and bytes: as many at once as the client has;
    but for the last batch, ``at_least`` so many if they are small. None is empty.

    With ``require_all``, raises Failure `events-lost` if the topic no longer has one of these offsets.
    """
    yield from bounded(_read(settings, name, within, require_all=require_all), at_least)


def bounded(read: Iterable[Sequence[Message]], at_least: int) -> Generator[Sequence[Message], None, None]:
    """Records as they are read in batches, as `batches` says. No more than two are in memory at once."""
    waiting, waiting_bytes = list[Message](), 0
    for messages, size in _sized(read):
        if waiting and waiting_bytes + size > BATCH_BYTES:
            yield waiting
            waiting, waiting_bytes = [], 0
        waiting += messages
        waiting_bytes += size
        if len(waiting) >= at_least:
            yield waiting
            waiting, waiting_bytes = [], 0
    if waiting:
        yield waiting


def _read(
    settings: Settings, name: str, within: Within, *, require_all: bool
) -> Generator[Sequence[Message], None, None]:
    end = {partition: last for partition, (first, last) in within.items() if first < last}
    others = {"auto.offset.reset": "error" if require_all else "earliest", "enable.partition.eof": True}
    with consumer(settings, others=others) as client:
        client.assign([TopicPartition(name, partition, within[partition][0]) for partition in end])
        at, progress_at = {partition: within[partition][0] for partition in end}, time.monotonic()
        while end:
            first = client.poll(POLL_S)
            messages = [] if first is None else [first, *client.consume(BATCH_RECORDS - 1, 0)]
            stops = ends(messages)
            found = [message for message in messages if message.error() is None] if stops else messages
            # The end may be a marker, which no consumer returns but passes; or an aborted record whose marker is not to
            # be read yet, and then the client says only that it has come to the end.
            passed = client.position([TopicPartition(name, partition) for partition in end])
            places = [(place.partition, place.offset) for place in passed]
            # A client may also have begun elsewhere: at the earliest record, if the topic was created again meanwhile.
            is_within = len(end) == len(at) and all(at[number] <= offset <= end[number] for number, offset in places)
            yield found if is_within else _selected(found, within, end)
            places += [(message.partition() or 0, message.offset() or 0) for message in stops]
            reached = {number: offset for number, offset in places if number in end and offset > at[number]}
            if reached:
                progress_at = time.monotonic()
            else:
                require_progress(name, progress_at)
            at |= reached
            # Records behind an end would be fetched in vain.
            finished = [partition for partition in end if at[partition] >= end[partition]]
            client.pause([TopicPartition(name, partition) for partition in finished])
            for partition in finished:
                del end[partition]


def dropped_until(settings: Settings, name: str) -> datetime | None:
    """The latest moment whose events a topic of events may have dropped; None if it has dropped nothing.

    A partition has dropped only what came before the first record that it still has: by age, by size, or because a
    person has deleted records. A partition without any record has dropped all by age, because retention by size leaves
    the newest: there the topic's own retention is the bound.
    """
    cut = {number: marks for number, marks in topics.watermarks(settings, name).items() if marks[0] > 0}
    firsts = [next(read(settings, name, {number: marks}), None) for number, marks in cut.items()]
    emptied = None
    if None in firsts:  # a topic that keeps its records for ever was emptied by a person, at any time
        retention_ms = int(topics.config(settings, name)["retention.ms"])
        emptied = datetime.now(UTC) - timedelta(milliseconds=max(0, retention_ms))
    moments = [_timestamp(first) if first else emptied for first in firsts]
    return max((moment + CLOCK_MARGIN for moment in moments if moment), default=None)


def oldest(settings: Settings, name: str) -> datetime | None:
    """When the oldest record has arrived that a topic still has; None if it has none, or does not exist."""
    if not topics.exists(settings, name):
        return None
    return arrival(settings, name, topics.watermarks(settings, name))


def arrival(settings: Settings, name: str, within: Within) -> datetime | None:
    """When the first of the records arrived that a topic has within these offsets; None if it has none."""
    firsts = [next(read(settings, name, {number: marks}), None) for number, marks in within.items()]
    return min((_timestamp(first) for first in firsts if first), default=None)


def headers_of(message: Message) -> Sequence[Header]:
    """The headers of a record; none if the name of one is no UTF-8.

    Kafka defines such a name as UTF-8, but brokers do not check it, and confluent-kafka then returns none of the
    record's headers: for all our readers such a record has none.
    """
    try:
        found: Any = HEADERS(message) or []  # stubs are wider
    except (SystemError, UnicodeDecodeError):  # the one is how Python reports such a call, caused by the other
        message.set_headers([])  # it has kept the list with gaps
        return []
    headers: Sequence[Header] = found
    return headers


def require_progress(name: str, progress_at: float) -> None:
    """Raises Failure if the last of the wanted records came too long ago, by the monotonic clock."""
    limit_s = SILENCE_TIMEOUT_S * timeout_scale()
    if time.monotonic() - progress_at > limit_s:
        raise Failure(
            f"topic {name} sent no record for {limit_s:.0f} s", "`outbox doctor` looks at Kafka", code="topic-silent"
        )


def ends(messages: Iterable[Message]) -> Sequence[Message]:
    """Those of some messages that are no records but mark the end of a partition. Raises KafkaException for an error,
    and Failure `events-lost` if the topic has dropped what was to be read.
    """
    if not any(map(Message.error, messages)):  # as mostly: no call in Python for each
        return []
    others = [(message, error) for message in messages if (error := message.error()) is not None]
    for message, error in others:
        if not is_end(message):
            if error.code() != KafkaError._AUTO_OFFSET_RESET:
                raise KafkaException(error)
            raise Failure(
                f"topic {message.topic()} no longer has what was to be read: {error.str()}",
                "`outbox check` shows what is missing",
                code="events-lost",
            )
    return [message for message, _ in others]


def _selected(messages: Sequence[Message], within: Within, end: Mapping[int, int]) -> Sequence[Message]:
    """The records between the first offset and the end of a partition that was not read before them."""
    # By columns, as in `size_bytes`: without a call in Python for each record.
    places: Iterable[tuple[Message, Any, Any]] = zip(
        messages, map(Message.partition, messages), map(Message.offset, messages), strict=True
    )
    return [
        message
        for message, partition, offset in places
        if partition in end and within[partition][0] <= offset < end[partition]
    ]


def _sized(parts: Iterable[Sequence[Message]]) -> Iterator[tuple[Sequence[Message], int]]:
    """The records in parts that are bounded in bytes, each with its size. None is empty."""
    for messages in parts:
        size = size_bytes(messages)
        if size <= BATCH_BYTES:
            if messages:
                yield messages, size
            continue
        part, size = list[Message](), 0
        for message in messages:
            part.append(message)
            size += size_bytes([message])
            if size > BATCH_BYTES:
                yield part, size
                part, size = [], 0
        if part:
            yield part, size


def size_bytes(messages: Sequence[Message]) -> int:
    """About how many bytes values, keys and headers have together."""
    headers = list(map(headers_of, messages))
    others = filter(None, chain(map(Message.key, messages), chain.from_iterable(chain.from_iterable(headers))))
    return sum(map(len, messages)) + sum(map(len, others)) + HEADER_BYTES * sum(map(len, headers))


def is_end(message: Message) -> bool:
    """Whether it is no record but says that the client has come to the end of what is committed, at its offset."""
    error = message.error()
    return error is not None and error.code() == KafkaError._PARTITION_EOF


def _timestamp(message: Message) -> datetime:
    return datetime.fromtimestamp(message.timestamp()[1] / 1000, UTC)
