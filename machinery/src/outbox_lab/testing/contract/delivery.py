"""Deliver events to a sink as its driver does, by its own writer, without Kafka; without Spark, unless its job has a
transform.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import NamedTuple

from outbox.base.database import connect
from outbox.base.settings import SinkRole
from outbox.events.schema import Rejection
from outbox.kafka.topics import Topic
from outbox.sink.decoding.batch import Batch
from outbox.sink.decoding.decoder import Skipped
from outbox.sink.decoding.records import DeadRecord, Place, Record
from outbox.sink.repair import rebuild, replay
from outbox.sink.repair.replay import Selection
from outbox.sink.spec import SinkSpec, Transformed
from outbox.sink.writer import Applier, SinkWriter
from outbox_lab.testing.contract.events import Sent
from outbox_lab.testing.contract.result import Database
from outbox_lab.testing.fixtures.spark import running
from outbox_lab.testing.sinks import at_places

TOPIC_ID = "contract"
SET_ASIDE = "set aside by the contract test"


class Placed(NamedTuple):
    """An event at a place of its topic."""

    sent: Sent
    partition: int
    offset: int


class Delivery:
    """Deliveries to one sink, each of which begins where the last has ended."""

    def __init__(self, database: Database, spec: SinkSpec, transform: Transformed | None = None) -> None:
        self.spec = spec
        self._database, self._transform = database, transform
        self._open = ExitStack()
        self._writer: SinkWriter | None = None
        self._records: dict[str, dict[Place, Record]] = {}  # by topic and place, those of the last batch

    def apply(self, placed: Sequence[Placed], set_aside: Collection[str] = ()) -> None:
        """Apply events as one batch of each of their topics. Those whose ids are ``set_aside`` become dead letters, as
        if the sink could not read their records; but an event that it has not asked for is passed.

        Raises Failure if the sink refuses a batch.
        """
        for topic in dict.fromkeys(one.sent.topic for one in placed):
            of_topic = [one for one in placed if one.sent.topic == topic]
            self._apply(topic, of_topic, set_aside)

    def restart(self) -> None:
        """End the driver and start another one."""
        self.close()

    def close(self) -> None:
        """End the driver."""
        for connection in () if self._writer is None else self._writer.connections:
            connection.close()
        self._writer = None
        self._open.close()

    def replay(self) -> None:
        """Replay what was set aside, as `outbox dead-letters replay` does."""
        self.close()
        with closing(connect(self._database.settings, SinkRole.WRITER)) as connection:
            chosen = Selection(sink=self.spec.name, reason=SET_ASIDE).choose(connection, with_parked=True)
            replay.replay(connection, {self.spec.name: self.spec}, chosen, applier_of=self._applier)

    def rebuild(self, placed: Sequence[Placed]) -> None:
        """Recompute the sink from its topics, which have these events, as `outbox rebuild --from topic` does."""
        self.close()
        topics = [Topic(name, TOPIC_ID, 1) for name in self.spec.topics]
        first = {topic.name: {0: 0} for topic in topics}
        with rebuild.reserved(self._database.settings, self.spec.name) as connection:
            rebuild.begin(connection, self.spec.name, topics, first)
            copy = replace(self.spec, name=rebuild.copy_of(self.spec.name))
            with closing(Delivery(self._database, copy, self._transform)) as to_copy:
                to_copy.apply(placed)
            rebuild.swap(connection, self.spec.name, topics, first)

    @property
    def writer(self) -> SinkWriter:
        """The writer of the driver that runs; a driver is started if none does."""
        if self._writer is None:
            connection = self._open.enter_context(closing(connect(self._database.settings, SinkRole.WRITER)))
            self._writer = self.spec.target.writer(self._database.settings, connection, self.spec, self._fetch)
            if self._transform is not None:
                self._writer.prepare(self._transform.schema)
        return self._writer

    def _apply(self, topic: str, placed: Sequence[Placed], set_aside: Collection[str]) -> None:
        self._records[topic] = {(one.partition, one.offset): one.sent.record for one in placed}
        stored = self.writer.positions(topic, TOPIC_ID)
        offsets: dict[int, list[int]] = {}
        for one in placed:
            offsets.setdefault(one.partition, []).append(one.offset)
        start = {partition: min(*of, stored.get(partition, 0)) for partition, of in offsets.items()}
        end = {partition: max(of) + 1 for partition, of in offsets.items()}
        decoder = self.spec.decoders[topic]
        aside = {
            one.sent.event_id
            for one in placed
            if one.sent.event_id in set_aside and not isinstance(decoder.record(one.sent.record), Skipped)
        }
        readable = [one for one in placed if one.sent.event_id not in aside]
        places = [(one.partition, one.offset) for one in readable]
        decoded = decoder.decode(at_places([one.sent.record for one in readable], places))
        dead = [*decoded.dead, *(_dead(one) for one in placed if one.sent.event_id in aside)]
        chunk = self.spec.chunking(topic).of_decoded(decoded._replace(dead=dead))
        batch = Batch(topic, TOPIC_ID, start, end, chunk)
        if self._transform is not None and chunk.events is not None:
            batch = replace(batch, returned=self._transform.apply(topic, chunk.events))
        self.writer.apply(batch)

    def _fetch(self, topic: str, places: Collection[Place]) -> list[tuple[Place, Record]]:
        return [(place, self._records[topic][place]) for place in places]

    def _applier(self, spec: SinkSpec) -> Applier:
        return spec.target.applier(self._database.settings, spec, self._transform)


def placed(
    sent: Sequence[Sent], first: Mapping[str, int] | int = 0, *, step: int = 1, partition: int = 0
) -> list[Placed]:
    """Events one after the other on their topics, from an offset on."""
    next_: dict[str, int] = {}
    found = list[Placed]()
    for one in sent:
        offset = next_.setdefault(one.topic, first if isinstance(first, int) else first.get(one.topic, 0))
        found.append(Placed(one, partition, offset))
        next_[one.topic] = offset + step
    return found


def after(events: Sequence[Placed]) -> dict[str, int]:
    """By topic the offset behind these."""
    found: dict[str, int] = {}
    for one in events:
        found[one.sent.topic] = max(found.get(one.sent.topic, 0), one.offset + 1)
    return found


def _dead(one: Placed) -> DeadRecord:
    rejection = Rejection(SET_ASIDE, SET_ASIDE)
    return DeadRecord(one.partition, one.offset, one.sent.record, one.sent.event_id, rejection)


@contextmanager
def transformed(spec: SinkSpec, database: Database) -> Iterator[Transformed]:
    """The transform of a job, in a Spark session until the end of the block. Raises Failure if it cannot be used."""
    from outbox.sink.spark.transform import Transform  # only jobs with a transform need Spark

    with running(database.settings, [spec.target]) as spark:
        yield Transform(spark, spec).transformed
