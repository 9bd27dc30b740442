"""The generations of a sink's checkpoint, which begin at offsets that are kept in the database.

A rewind starts the next one and stores where it begins. A sink that cannot continue its checkpoint starts the next one
too, and leaves the stored beginning as it is. `outbox.sink.running.checkpoint` reads the checkpoint itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from psycopg2 import extensions
from psycopg2.extras import execute_values

from outbox.base.settings import Settings
from outbox.sink.remembering.positions import Offsets

LOCAL = re.compile(r"(?:file:(?://)?)?(/.*)")

INSERT = 'INSERT INTO public.checkpoint_generations (sink, generation, topic, partition, "offset") VALUES %s'
BEGINNING = 'SELECT topic, partition, "offset" FROM public.checkpoint_generations WHERE sink = %s AND generation = %s'

TopicOffsets = Mapping[str, Offsets]  # by topic


class Beginning(NamedTuple):
    """Where the checkpoint of a generation begins, by topic; empty unless something has set where it begins."""

    generation: int
    offsets: dict[str, dict[int, int]]


def start_next(cursor: extensions.cursor, sink: str, offsets: TopicOffsets) -> int:
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
    execute_values(cursor, INSERT, rows)
    return int(generation)


def beginning(cursor: extensions.cursor, sink: str) -> Beginning:
    """The sink's generation, and where its checkpoint begins."""
    cursor.execute("SELECT generation FROM public.sinks WHERE name = %s", (sink,))
    (generation,) = cursor.fetchone() or (0,)
    cursor.execute(BEGINNING, (sink, generation))
    found: dict[str, dict[int, int]] = {}
    for topic, partition, offset in cursor:
        found.setdefault(topic, {})[partition] = offset
    return Beginning(int(generation), found)


def checkpoint_uri(settings: Settings, sink: str, generation: int) -> str:
    """The checkpoint of a generation of a sink: one that cannot be continued is left for the next."""
    return f"{settings.checkpoints.rstrip('/')}/{f'{sink}.{generation}' if generation else sink}"


def checkpoint_folder(uri: str) -> Path | None:
    """The folder of a checkpoint; None if it is elsewhere, as in an object store. Nothing is percent-encoded."""
    found = LOCAL.fullmatch(uri)
    return Path(found[1]) if found else None
