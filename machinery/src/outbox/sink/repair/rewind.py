"""Replay on purpose: reset the offsets that a sink reads from.

Its positions stay, because they say what is applied. A rewind sets where its next checkpoint begins. To the strategy it
is a re-read, exactly as after a lost checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import datetime
from typing import NamedTuple

from psycopg2 import extensions

from outbox.base.database import connect
from outbox.base.errors import Failure
from outbox.base.settings import Settings, SinkRole
from outbox.kafka import topics
from outbox.sink.discovery import chosen
from outbox.sink.remembering import asked, fence, positions
from outbox.sink.remembering.positions import Offsets


class TopicPartition(NamedTuple):
    """A partition of a topic."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}"


class Move(NamedTuple):
    """One partition: where the sink is, and where it will read from. What lies between is replayed; or given up, if
    the sink is to begin beyond its position.
    """

    position: int
    begin: int


Moves = Mapping[TopicPartition, Move]


def to_positions(settings: Settings, sink: str) -> dict[TopicPartition, Move]:
    """Read on from what its database says, whatever its checkpoint says."""
    return to_offsets(settings, sink, {})


def to_earliest(settings: Settings, sink: str) -> dict[TopicPartition, Move]:
    """Read everything that the topics still have."""
    return to_offsets(settings, sink, _of_topics(settings, sink, topics.first_offsets))


def to_datetime(settings: Settings, sink: str, moment: datetime) -> dict[TopicPartition, Move]:
    """Read what arrived on the topics then or later."""
    since = _of_topics(settings, sink, lambda _, topic: topics.offsets_since(settings, topic, moment))
    return to_offsets(settings, sink, since)


def to_offsets(settings: Settings, sink: str, begin: Mapping[TopicPartition, int]) -> dict[TopicPartition, Move]:
    """Read these partitions from these offsets, but never from beyond a position, which would lose events. The others
    continue.
    """
    described = [topics.describe(settings, topic) for topic in chosen(settings, sink).topics]
    with closing(connect(settings, SinkRole.WRITER)) as connection, connection, connection.cursor() as cursor:
        stored = _positions(cursor, sink, described)
    if not stored:
        raise Failure(
            f"sink {sink} has read none of its topics yet", f"`outbox sink {sink}` runs it", code="nothing-to-replay"
        )
    return {place: Move(position, min(position, begin.get(place, position))) for place, position in stored.items()}


def skip_dropped(settings: Settings, sink: str, moves: Moves) -> dict[TopicPartition, Move]:
    """The given moves, but events that the topics dropped before the sink applied them are given up, also on partitions
    that were added to a topic and have no position yet.
    """
    first = _of_topics(settings, sink, topics.first_offsets)
    known = {place.topic for place in moves}
    added = {place: Move(0, 0) for place, offset in first.items() if place.topic in known and offset}
    return {
        place: move._replace(begin=max(move.begin, first.get(place, 0))) for place, move in {**added, **moves}.items()
    }


def accept_recreated(settings: Settings, sink: str) -> list[str]:
    """Let the sink read topics that were deleted and created again from their first event. Returns their names.

    What it has applied stays, and so does what its strategy remembers of events. Its other topics continue. Raises
    Failure if none of its topics was created again or one has fewer partitions than before, or if a driver runs.
    """
    described = [topics.describe(settings, topic) for topic in chosen(settings, sink).topics]
    with _stopped(settings, sink) as cursor:
        accepted = [topic.name for topic in described if positions.accept_recreated(cursor, sink, topic.name, topic.id)]
        if not accepted:
            raise Failure(f"sink {sink}: no topic was created again", "start the sink", code="nothing-to-replay")
        begin = {topic.name: positions.read(cursor, sink, topic.name, topic.id) for topic in described}
        for topic in described:
            if topic.partitions < (needed := max(begin[topic.name], default=-1) + 1):
                raise Failure(
                    f"topic {topic.name} was created again with {topic.partitions} partitions; sink {sink} had read "
                    f"{needed}",
                    "delete it, and let `outbox connect apply` create it with as many as before",
                    code="topic-partitions",
                )
        positions.start_generation(cursor, sink, begin)
    return accepted


def rewind(settings: Settings, sink: str, moves: Moves) -> int:
    """Let the sink begin there at its next start, and return the generation that begins.

    The sink asks for what its job asks for now: the user who rewinds decides where the sink begins. One transaction,
    under the sink's fence. Raises Failure if a driver runs, if the job has another strategy than at the sink's last
    start, or if the sink is not where the moves say any more: somebody has run it or rebuilt it meanwhile.
    """
    begin: dict[str, dict[int, int]] = {}
    for place, move in moves.items():
        begin.setdefault(place.topic, {})[place.partition] = move.begin
    described, spec = [topics.describe(settings, topic) for topic in begin], chosen(settings, sink)
    with _stopped(settings, sink) as cursor:
        asked.require_same_strategy(cursor, spec.asked)
        stored = _positions(cursor, sink, described)
        if stored != {place: move.position for place, move in moves.items() if place in stored or move.position}:
            raise Failure(
                f"sink {sink} is not where it was when the command looked: it was run or rebuilt meanwhile",
                "nothing was changed: run the command again",
                code="sink-moved",
            )
        for topic in described:
            positions.write(cursor, sink, topic.name, topic.id, begin[topic.name])  # past what is given up
        asked.decide(cursor, spec.asked)
        return positions.start_generation(cursor, sink, begin)


@contextmanager
def _stopped(settings: Settings, sink: str) -> Iterator[extensions.cursor]:
    """One transaction about a sink, under its fence and its lock. Raises Failure if a driver runs."""
    with closing(connect(settings, SinkRole.WRITER)) as connection:
        fence.acquire(connection, sink)
        with connection, connection.cursor() as cursor:
            fence.lock(cursor, sink)
            yield cursor


def _of_topics(settings: Settings, sink: str, look_up: Callable[[Settings, str], Offsets]) -> dict[TopicPartition, int]:
    return {
        TopicPartition(topic, partition): offset
        for topic in chosen(settings, sink).topics
        for partition, offset in look_up(settings, topic).items()
    }


def _positions(cursor: extensions.cursor, sink: str, read: Sequence[topics.Topic]) -> dict[TopicPartition, int]:
    return {
        TopicPartition(topic.name, partition): position
        for topic in read
        for partition, position in sorted(positions.read(cursor, sink, topic.name, topic.id).items())
    }
