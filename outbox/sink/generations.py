"""The generations of a sink's checkpoint: each rewind starts the next one, at offsets that are kept in the database."""

from __future__ import annotations

from typing import NamedTuple

from psycopg2 import extensions
from psycopg2.extras import execute_values

from outbox.sink.positions import Offsets

INSERT = 'INSERT INTO checkpoint_generations (sink, generation, topic, partition, "offset") VALUES %s'
BEGINNING = """
SELECT partition, "offset" FROM checkpoint_generations WHERE sink = %s AND topic = %s AND generation = %s
"""


class Beginning(NamedTuple):
    """Where the checkpoint of a generation begins, by partition; empty unless a rewind started the generation."""

    generation: int
    offsets: dict[int, int]


def start_next(cursor: extensions.cursor, sink: str, topic: str, offsets: Offsets) -> int:
    """Let the sink's next checkpoint begin there, in the caller's transaction with the lock held; return its number.

    A running driver keeps the checkpoint that it has, so it has to be stopped or superseded.
    """
    cursor.execute("UPDATE sinks SET generation = generation + 1 WHERE name = %s RETURNING generation", (sink,))
    (generation,) = cursor.fetchone() or (0,)
    rows = [(sink, generation, topic, partition, offset) for partition, offset in sorted(offsets.items())]
    execute_values(cursor, INSERT, rows)
    return int(generation)


def beginning(cursor: extensions.cursor, sink: str, topic: str) -> Beginning:
    """The sink's generation, and where a rewind has set its beginning."""
    cursor.execute("SELECT generation FROM sinks WHERE name = %s", (sink,))
    (generation,) = cursor.fetchone() or (0,)
    cursor.execute(BEGINNING, (sink, topic, generation))
    return Beginning(int(generation), dict(cursor.fetchall()))
