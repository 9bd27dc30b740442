"""Replay on purpose: reset the offsets that a sink reads from.

Its positions stay, because they say what is applied. A rewind sets where its next checkpoint begins. To the strategy it
is a re-read, exactly as after a lost checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from datetime import datetime
from typing import NamedTuple

from outbox.base.database import connect
from outbox.base.errors import Failure
from outbox.base.settings import Settings, SinkRole
from outbox.kafka import topics
from outbox.sink import fence, generations, positions
from outbox.sink.positions import Offsets
from outbox.sink.spec import topic_of


class Move(NamedTuple):
    """One partition: where the sink is, and where it will read from. What lies between is replayed; or given up, if
    the sink is to begin beyond its position.
    """

    position: int
    begin: int


def to_positions(settings: Settings, sink: str) -> dict[int, Move]:
    """Read on from what its database says, whatever its checkpoint says."""
    return _moves(settings, sink, {})


def to_earliest(settings: Settings, sink: str) -> dict[int, Move]:
    """Read everything that the topic still has."""
    return _moves(settings, sink, topics.first_offsets(settings, topic_of(settings, sink)))


def to_datetime(settings: Settings, sink: str, moment: datetime) -> dict[int, Move]:
    """Read what arrived on the topic then or later."""
    return _moves(settings, sink, topics.offsets_since(settings, topic_of(settings, sink), moment))


def to_offsets(settings: Settings, sink: str, offsets: Offsets) -> dict[int, Move]:
    """Read these partitions from these offsets; the others continue.

    Raises Failure for an offset that the topic has dropped, or that the sink has not reached.
    """
    topic = topic_of(settings, sink)
    first = topics.first_offsets(settings, topic)
    for partition, offset in offsets.items():
        if partition not in first:
            raise Failure(
                f"topic {topic} has no partition {partition}",
                f"it has {', '.join(map(str, first))}",
                code="partition-unknown",
            )
        if offset < first[partition]:
            raise Failure(
                f"partition {partition} begins at offset {first[partition]}; the topic has dropped {offset}",
                code="offset-dropped",
            )
    moves = _moves(settings, sink, offsets)
    for partition, offset in offsets.items():
        if offset > moves[partition].position:
            raise Failure(
                f"sink {sink} is at offset {moves[partition].position} of partition {partition}: "
                f"beginning at {offset} would skip events",
                "rewind to its position or before",
                code="offset-ahead",
            )
    return moves


def skip_dropped(settings: Settings, sink: str, moves: Mapping[int, Move]) -> dict[int, Move]:
    """The same moves, but events that the topic dropped before the sink applied them are given up."""
    first = topics.first_offsets(settings, topic_of(settings, sink))
    return {key: move._replace(begin=max(move.begin, first.get(key, 0))) for key, move in moves.items()}


def rewind(settings: Settings, sink: str, moves: Mapping[int, Move]) -> int:
    """Let the sink begin there at its next start, and return the generation that begins.

    One transaction, under the sink's fence. Raises Failure if a driver runs.
    """
    topic = topics.describe(settings, topic_of(settings, sink))
    begin = {partition: move.begin for partition, move in moves.items()}
    with closing(connect(settings, SinkRole.WRITER)) as connection:
        fence.acquire(connection, sink)
        with connection, connection.cursor() as cursor:
            fence.lock(cursor, sink)
            positions.write(cursor, sink, topic.name, topic.id, begin)  # forward only: past what is given up
            return generations.start_next(cursor, sink, topic.name, begin)


def _moves(settings: Settings, sink: str, begin: Offsets) -> dict[int, Move]:
    """By partition that the sink has read: never beyond its position, which would lose events."""
    topic = topics.describe(settings, topic_of(settings, sink))
    with closing(connect(settings, SinkRole.WRITER)) as connection, connection, connection.cursor() as cursor:
        stored = positions.read(cursor, sink, topic.name, topic.id)
    if not stored:
        raise Failure(
            f"no sink called {sink} has read topic {topic.name}",
            f"`outbox sink --strategy {sink}` runs it",
            code="sink-unknown",
        )
    return {
        partition: Move(position, min(position, begin.get(partition, position)))
        for partition, position in sorted(stored.items())
    }
