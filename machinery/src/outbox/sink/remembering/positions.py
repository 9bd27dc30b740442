"""Positions: how far each sink has applied each partition, kept in the database that it applies to.

They are compared with what the reader offers. A range that begins beyond the position, or belongs to a topic that was
deleted and made again, means that events in between will never come: then the sink stops rather than go on without
them. A range that begins below is a re-read, which is what strategies are for.

Each generation of a sink's checkpoint begins at offsets that are stored here too. A rewind starts the next generation
and stores where it begins. A sink that cannot continue its checkpoint starts the next one too, and leaves the stored
beginning as it is. `outbox.sink.running.checkpoint` reads the checkpoint itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from outbox.base.errors import Failure
from outbox.base.heavy import extensions, extras
from outbox.base.settings import Settings

Offsets = Mapping[int, int]  # by partition
TopicOffsets = Mapping[str, Offsets]  # by topic

COPY_SUFFIX = ".rebuild"  # of the copy of a sink that `outbox.sink.repair.rebuild` makes
LOCAL = re.compile(r"(?:file:(?://)?)?(/.*)")

UPSERT = """
INSERT INTO public.positions (sink, topic, partition, topic_id, next_offset) VALUES %s
ON CONFLICT (sink, topic, partition) DO UPDATE SET next_offset = greatest(positions.next_offset, excluded.next_offset)
"""
INSERT_BEGINNING = """
INSERT INTO public.checkpoint_generations (sink, generation, topic, partition, "offset") VALUES %s
"""
BEGINNING = 'SELECT topic, partition, "offset" FROM public.checkpoint_generations WHERE sink = %s AND generation = %s'


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
    """The remedy for a topic that was deleted and created again."""
    return remedy(
        sink, f"compare with `outbox check`; `outbox rewind {sink} --accept-recreated` lets it read the new topic"
    )


def remedy(sink: str, of_sink: str = "") -> str:
    """The remedy for a sink that cannot go on; for a copy of a sink, to drop it: no other command takes its name."""
    name = sink.removesuffix(COPY_SUFFIX)
    return of_sink if name == sink else f"`outbox rebuild {name} --from topic --drop-copy`, then rebuild it again"


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
    if not cursor.rowcount:
        return False
    cursor.execute("UPDATE public.sinks SET unfinished = '{}' WHERE name = %s", (sink,))  # offsets of that topic
    return True


def read_all(cursor: extensions.cursor, sink: str) -> dict[str, dict[int, int]]:
    """By topic, the next offset of each partition that the sink has ever read."""
    cursor.execute("SELECT topic, partition, next_offset FROM public.positions WHERE sink = %s", (sink,))
    return _by_topic(cursor)


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
                remedy(sink, f"start the sink again; if it fails again, `outbox rebuild {sink} --from source`"),
                code="events-lost",
            )


def write(cursor: extensions.cursor, sink: str, topic: str, topic_id: str, end: Offsets) -> None:
    """Move the positions forward, in the caller's transaction. A re-read does not move them back."""
    rows = [(sink, topic, partition, topic_id, offset) for partition, offset in sorted(end.items())]
    extras.execute_values(cursor, UPSERT, rows)


class Beginning(NamedTuple):
    """Where the checkpoint of a generation begins, by topic; empty unless something has set where it begins."""

    generation: int
    offsets: dict[str, dict[int, int]]


def start_generation(cursor: extensions.cursor, sink: str, offsets: TopicOffsets) -> int:
    """Let the sink's next checkpoint begin there, in the caller's transaction with the lock held; return its number.

    A running driver keeps the checkpoint that it has, so it has to be stopped or superseded.
    """
    cursor.execute("UPDATE public.sinks SET generation = generation + 1 WHERE name = %s RETURNING generation", (sink,))
    (generation,) = cursor.fetchone() or (0,)
    rows = [
        (sink, generation, topic, partition, offset)
        for topic, of_topic in sorted(offsets.items())
        for partition, offset in sorted(of_topic.items())
    ]
    extras.execute_values(cursor, INSERT_BEGINNING, rows)
    return int(generation)


def beginning(cursor: extensions.cursor, sink: str) -> Beginning:
    """The sink's generation, and where its checkpoint begins."""
    cursor.execute("SELECT generation FROM public.sinks WHERE name = %s", (sink,))
    (generation,) = cursor.fetchone() or (0,)
    cursor.execute(BEGINNING, (sink, generation))
    return Beginning(int(generation), _by_topic(cursor))


def _by_topic(cursor: extensions.cursor) -> dict[str, dict[int, int]]:
    found: dict[str, dict[int, int]] = {}
    for topic, partition, offset in cursor:
        found.setdefault(topic, {})[partition] = offset
    return found


def checkpoint_uri(settings: Settings, sink: str, generation: int) -> str:
    """The checkpoint of a generation of a sink: one that cannot be continued is left for the next."""
    return f"{settings.checkpoints}/{f'{sink}.{generation}' if generation else sink}"


def checkpoint_folder(uri: str) -> Path | None:
    """The folder of a checkpoint; None if it is elsewhere, as in an object store. Nothing is percent-encoded."""
    found = LOCAL.fullmatch(uri)
    return Path(found[1]) if found else None
