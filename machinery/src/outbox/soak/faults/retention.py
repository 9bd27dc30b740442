"""Retention: a topic drops records that every sink has applied. It changes nothing for any sink."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from confluent_kafka import TopicPartition

from outbox.audit import declared
from outbox.audit.declared import Declared, EventTopic
from outbox.base.settings import SinkRole
from outbox.kafka import topics
from outbox.kafka.clients import Admin
from outbox.soak import observe
from outbox.soak.fault import Fault, NotFired, wait_or_not_fired
from outbox.soak.faults import commands
from outbox.soak.faults.sinks import wait_committed
from outbox.soak.seen import Event
from outbox.soak.testbed import Testbed

POSITIONS = """
SELECT partition, min(next_offset) FROM positions WHERE topic = %s AND sink = ANY(%s) GROUP BY partition
"""
OUTBOX = "SELECT id::text FROM outbox"
ROOM_TIMEOUT_S = 300.0


class Shortened(Fault):
    """A topic drops what all sinks have applied and `outbox prune` has deleted, as its retention does."""

    name = "topic-shortened"
    parts = ()
    needs = ("sinks", "postgres", "kafka", "sinks-kafka", "sinks-postgres")  # none may read again what is dropped
    lasts_s = (0.0, 0.0)

    def fire(self, testbed: Testbed, chance: random.Random) -> str:
        known = declared.load(testbed.settings)
        found: list[tuple[EventTopic, dict[int, int]]] = []

        def has_room() -> bool:
            commands.run(testbed, "prune", "--keep-hours", "0", expected=commands.Prune.expected)
            for topic in chance.sample(known.topics, len(known.topics)):
                ends = self._ends(testbed, known, topic, chance)
                if ends:
                    found[:] = [(topic, ends)]
                    return True
            return False

        wait_or_not_fired("records that nobody needs", has_room, timeout_s=ROOM_TIMEOUT_S, poll_s=5)
        [(topic, ends)] = found
        dropped = self._drop(testbed, known, topic, ends)
        for sink in testbed.readers(topic.name):
            wait_committed(testbed, sink.name, time.time())
        return f"{topic.name} has dropped {dropped} events, and its sinks have committed again"

    @staticmethod
    def _ends(testbed: Testbed, known: Declared, topic: EventTopic, chance: random.Random) -> dict[int, int]:
        """By partition where events can be dropped, the offset before which they are: behind one of them, by chance."""
        settings = testbed.settings
        firsts = topics.first_offsets(settings, topic.name)
        applied = _applied(testbed, topic.name)
        kept = {event_id for (event_id,) in testbed.query(OUTBOX)}
        within = {partition: (first, applied.get(partition, first)) for partition, first in firsts.items()}
        room: dict[int, list[int]] = defaultdict(list)
        is_needed: set[int] = set()  # partitions of which the outbox has an event
        for event in sorted(observe.events_of(settings, known, topic, within), key=lambda one: one.offset):
            if event.id in kept:
                is_needed.add(event.partition)
            if event.partition not in is_needed:
                room[event.partition].append(event.offset + 1)
        return {partition: chance.choice(ends) for partition, ends in room.items()}

    @staticmethod
    def _drop(testbed: Testbed, known: Declared, topic: EventTopic, ends: dict[int, int]) -> int:
        """Drop the records before these offsets, and keep their events for the checkers. Returns how many they are."""
        settings = testbed.settings
        firsts = topics.first_offsets(settings, topic.name)
        within = {partition: (firsts[partition], end) for partition, end in ends.items()}
        events: list[Event] = list(observe.events_of(settings, known, topic, within))
        testbed.dropped += events
        admin = Admin(settings)
        places = [TopicPartition(topic.name, partition, end) for partition, end in ends.items()]
        for request in admin.client.delete_records(places).values():
            admin.result(request)
        left = topics.first_offsets(settings, topic.name)
        if any(left[partition] != end for partition, end in ends.items()) or not events:
            raise NotFired(f"{topic.name} begins at {left} and not at {ends}, and has dropped {len(events)} events")
        return len(events)


def _applied(testbed: Testbed, topic: str) -> dict[int, int]:
    """By partition, the offset before which no sink reads again, even if the last commit of its checkpoint is lost."""
    sinks = [one.name for one in testbed.readers(topic)]
    found: dict[int, int] = dict(testbed.query(POSITIONS, [topic, sinks], SinkRole.AUDITOR))
    for _ in range(2):
        since_s = time.time()
        for sink in sinks:
            wait_committed(testbed, sink, since_s)
    return found


FAULTS: Sequence[Callable[[], Fault]] = (Shortened,)
