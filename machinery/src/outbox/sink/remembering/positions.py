"""Positions: how far each sink has applied each partition, kept in the database that it applies to.

They are compared with what the reader offers. A range that begins beyond the position, or belongs to a topic that was
deleted and made again, means that events in between will never come: then the sink stops rather than go on without
them. A range that begins below is a re-read, which is what strategies are for.
"""

from __future__ import annotations

from collections.abc import Mapping

from psycopg2 import extensions
from psycopg2.extras import execute_values

from outbox.base.errors import Failure

Offsets = Mapping[int, int]  # by partition

UPSERT = """
INSERT INTO public.positions (sink, topic, partition, topic_id, next_offset) VALUES %s
ON CONFLICT (sink, topic, partition) DO UPDATE SET next_offset = greatest(positions.next_offset, excluded.next_offset)
"""


def read(cursor: extensions.cursor, sink: str, topic: str, topic_id: str) -> dict[int, int]:
    """The next offset of each partition that the sink has read.

    Raises Failure if they are those of an earlier topic of the same name.
    """
    cursor.execute(
        "SELECT partition, topic_id, next_offset FROM public.positions WHERE sink = %s AND topic = %s", (sink, topic)
    )
    stored = {}
    for partition, of_topic, next_offset in cursor:
        if of_topic != topic_id:
            raise recreated(sink, topic, of_topic, topic_id, f"partition {partition} had from offset {next_offset} on")
        stored[partition] = next_offset
    return stored


def recreated(sink: str, topic: str, before: str, now: str, unread: str) -> Failure:
    """The failure of a sink whose topic has another id than before; ``unread`` says what it has not read."""
    return Failure(
        f"sink {sink}: topic {topic} was deleted and made again (its id was {before} and is {now}): what {unread} may "
        "be lost",
        accept_remedy(sink),
        code="topic-recreated",
    )


def accept_remedy(sink: str) -> str:
    """What to do about a topic that was deleted and created again."""
    return f"compare with `outbox check`; `outbox rewind {sink} --accept-recreated` lets it read the new topic"


def accept_recreated(cursor: extensions.cursor, sink: str, topic: str, topic_id: str) -> bool:
    """Move positions of an earlier topic of the same name to the beginning of this one; whether there were any.

    From then on the topic does not have all that the sink has applied.
    """
    cursor.execute(
        "UPDATE public.positions"
        " SET topic_id = %s, next_offset = 0, based = 0, is_recreated = is_recreated OR next_offset > 0"
        " WHERE sink = %s AND topic = %s AND topic_id <> %s",
        (topic_id, sink, topic, topic_id),
    )
    return bool(cursor.rowcount)


def read_all(cursor: extensions.cursor, sink: str) -> dict[str, dict[int, int]]:
    """By topic, the next offset of each partition that the sink has ever read."""
    cursor.execute("SELECT topic, partition, next_offset FROM public.positions WHERE sink = %s", (sink,))
    found: dict[str, dict[int, int]] = {}
    for topic, partition, next_offset in cursor:
        found.setdefault(topic, {})[partition] = next_offset
    return found


def require_no_gap(sink: str, topic: str, stored: Offsets, start: Offsets) -> None:
    """Raises Failure naming the lost range if a partition would be read from beyond its position.

    A partition that the sink has no position of must be read from offset 0.
    """
    for partition, offset in sorted(start.items()):
        position = stored.get(partition, 0)
        if offset > position:
            raise Failure(
                f"sink {sink}: offsets {position} to {offset - 1} of topic {topic}, partition {partition}, were never "
                "applied, and the reader is beyond them: the topic has dropped them, or the database was restored "
                "beside the running sink",
                f"start the sink again; if it fails again, `outbox rebuild {sink} --from source`",
                code="events-lost",
            )


def write(cursor: extensions.cursor, sink: str, topic: str, topic_id: str, end: Offsets) -> None:
    """Move the positions forward, in the caller's transaction. A re-read does not move them back."""
    rows = [(sink, topic, partition, topic_id, offset) for partition, offset in sorted(end.items())]
    execute_values(cursor, UPSERT, rows)
