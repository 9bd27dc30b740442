"""Retention: a topic drops records that every sink has applied. It changes nothing for any sink."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from confluent_kafka import TopicPartition

from outbox.audit import declared
from outbox.base.settings import SinkRole
from outbox.kafka import topics
from outbox.kafka.clients import Admin
from outbox.kafka.records import Within
from outbox_lab.soak import captures, observe
from outbox_lab.soak.fault import Fault, Make, NotFired, wait_or_not_fired
from outbox_lab.soak.faults import commands
from outbox_lab.soak.faults.sinks import wait_committed
from outbox_lab.soak.seen import RowChange, TopicEvent
from outbox_lab.soak.testbed import Testbed

POSITIONS = """
SELECT partition, min(next_offset) FROM public.positions WHERE topic = %s AND sink = ANY(%s) GROUP BY partition
"""
OUTBOX = "SELECT id::text FROM public.outbox"
ROOM_TIMEOUT_S = 300.0


class Shortened(Fault):
    """A topic drops what all sinks have applied and `outbox prune` has deleted, as its retention does."""

    # The topic of a captured table drops what all sinks have applied: the source has nothing that could bring it again.

    name = "topic-shortened"
    parts = ()
    needs = ("sinks", "postgres", "kafka", "sinks-kafka", "sinks-postgres")  # none may read again what is dropped

    def fire(self, testbed: Testbed, chance: random.Random) -> str:
        every = [*_event_topics(testbed), *_captured(testbed)]

        def with_room() -> tuple[_Topic, dict[int, int]] | None:
            commands.run(testbed, "prune", "--keep-hours", "0", temporary=commands.Prune.temporary)
            for topic in chance.sample(every, len(every)):
                if ends := self._ends(testbed, topic, chance):
                    return topic, ends
            return None

        topic, ends = wait_or_not_fired("records that nobody needs", with_room, timeout_s=ROOM_TIMEOUT_S, poll_s=5)
        dropped = self._drop(testbed, topic, ends)
        for sink in testbed.readers(topic.name):
            wait_committed(testbed, sink.name, time.time())
        return f"{topic.name} has dropped {dropped} valid records, and its sinks have committed again"

    @staticmethod
    def _ends(testbed: Testbed, topic: _Topic, chance: random.Random) -> dict[int, int]:
        """By partition where records can be dropped, the offset before which they are: behind one, by chance."""
        settings = testbed.settings
        firsts = topics.first_offsets(settings, topic.name)
        applied = _applied(testbed, topic.name)
        kept = {event_id for (event_id,) in testbed.query(OUTBOX)}
        within = {partition: (first, applied.get(partition, first)) for partition, first in firsts.items()}
        room: dict[int, list[int]] = defaultdict(list)
        is_needed: set[int] = set()  # partitions of which the outbox has an event
        for record in sorted(topic.records(within), key=lambda one: one.offset):
            if record.identity in kept:
                is_needed.add(record.partition)
            if record.partition not in is_needed:
                room[record.partition].append(record.offset + 1)
        return {partition: chance.choice(ends) for partition, ends in room.items()}

    @staticmethod
    def _drop(testbed: Testbed, topic: _Topic, ends: dict[int, int]) -> int:
        """Drop the records before these offsets, and keep the valid ones for the checkers. Returns their number."""
        settings = testbed.settings
        firsts = topics.first_offsets(settings, topic.name)
        within = {partition: (firsts[partition], end) for partition, end in ends.items()}
        valid = list(topic.records(within))
        testbed.dropped += valid
        admin = Admin(settings)
        places = [TopicPartition(topic.name, partition, end) for partition, end in ends.items()]
        for request in admin.client.delete_records(places).values():
            admin.result(request)
        left = topics.first_offsets(settings, topic.name)
        if any(left[partition] != end for partition, end in ends.items()) or not valid:
            raise NotFired(
                f"{topic.name} begins at {left} and not at {ends}, and has dropped {len(valid)} valid records"
            )
        return len(valid)


class _Topic(NamedTuple):
    """A topic that sinks read, and how to read its valid records within offsets."""

    name: str
    records: Callable[[Within], Iterator[TopicEvent | RowChange]]


def _event_topics(testbed: Testbed) -> Iterator[_Topic]:
    known = declared.load(testbed.settings)
    for topic in known.topics:
        yield _Topic(topic.name, partial(observe.events_of, testbed.settings, known, topic))


def _captured(testbed: Testbed) -> Iterator[_Topic]:
    for connector in testbed.captures:
        decoder = testbed.readers(connector.topic)[0].decoders[connector.topic]
        yield _Topic(connector.topic, partial(captures.row_changes_of, testbed.settings, connector.topic, decoder))


def _applied(testbed: Testbed, topic: str) -> dict[int, int]:
    """By partition, the offset before which no sink reads again, even if the last commit of its checkpoint is lost."""
    sinks = [one.name for one in testbed.readers(topic)]
    found: dict[int, int] = dict(testbed.query(POSITIONS, [topic, sinks], SinkRole.AUDITOR))
    for _ in range(2):
        since_s = time.time()
        for sink in sinks:
            wait_committed(testbed, sink, since_s)
    return found


FAULTS: list[Make] = [Shortened]
