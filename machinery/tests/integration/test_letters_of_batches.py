"""A batch reads the dead letters of its events and keys, however many others there are, and whatever Postgres believes.

Letters come by the thousand in one transaction. Until autovacuum has counted them, statistics are those of before.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from random import Random

import pytest
from psycopg2 import extensions

from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole
from outbox.sink.writer import Counts
from tests.integration.test_parking import ORDERED, STATEMENT, TABLES
from tests.support.made_events import STRATEGIES, TOPIC, TOPIC_ID, Event, batch, nth_key, uuid7
from tests.support.sink_driver import Database, projections_in, sink_on

RANDOM = Random(12)  # noqa: S311
LETTERS = 100_000
# In turn: an open one of an event, one of a record that was invalid, a resolved one, and a discarded one.
FILL = """
INSERT INTO dead_letters (sink, identity, topic, topic_id, partition, "offset", key, is_event, version, value, event_id,
                          status, reason, detail)
SELECT %(sink)s, id, %(topic)s, %(topic_id)s, 0, number, convert_to('key-' || number, 'UTF8'),
       number %% 4 <> 1, number, 'bad', id,
       (ARRAY['open', 'open', 'replayed', 'discarded'])[number %% 4 + 1], 'unwelcome', 'as yet'
  FROM (SELECT number, uuidv7() AS id FROM generate_series(%(first)s::int, %(last)s::int) AS number) AS numbers
"""
LETTER = """
INSERT INTO dead_letters (sink, identity, topic, topic_id, partition, "offset", is_event, event_id, status, reason,
                          detail)
VALUES (%(sink)s, %(id)s, %(topic)s, %(topic_id)s, 1, 0, true, %(id)s, %(status)s, 'unwelcome', 'as yet')
"""
BUFFERS = """
SELECT heap_blks_read + heap_blks_hit + idx_blks_read + idx_blks_hit FROM pg_statio_user_tables
 WHERE relname = 'dead_letters'
"""


def fill(settings: Settings, sink: str, analyzed: int) -> None:
    """So many letters of the sink that statistics know, and then the others."""
    with closing(connect(settings, SinkRole.OWNER)) as owner, owner, owner.cursor() as cursor:
        cursor.execute("ALTER TABLE dead_letters SET (autovacuum_enabled = off)")
        names = {"sink": sink, "topic": TOPIC, "topic_id": TOPIC_ID}
        cursor.execute(FILL, {**names, "first": 1, "last": analyzed})
        cursor.execute("ANALYZE dead_letters")
        cursor.execute(FILL, {**names, "first": analyzed + 1, "last": LETTERS})


def buffers(connection: extensions.connection, settings: Settings) -> int:
    """How many buffers of dead_letters were read until now."""
    with connection, connection.cursor() as cursor:
        cursor.execute("SELECT pg_stat_force_next_flush()")
    [(count,)] = Database(settings).query(BUFFERS)
    return int(str(count))


@pytest.mark.parametrize("count", [1, 100])
@pytest.mark.parametrize("analyzed", [0, 10, LETTERS])
@pytest.mark.parametrize("by", ["dedup", "offsets"])
def test_letters_of_others_are_not_read_whatever_statistics_say(
    databases: Settings, tmp_path: Path, by: str, analyzed: int, count: int
) -> None:
    fill(databases, by, analyzed)
    some = [Event(uuid7(RANDOM), nth_key(number + 1), 1, 1) for number in range(count)]
    first, late, discarded, replayed = (
        Event(uuid7(RANDOM), nth_key(key), 1, version) for key, version in [(0, 1), (0, 2), (3001, 1), (3002, 1)]
    )
    with closing(connect(databases, SinkRole.OWNER)) as owner, owner, owner.cursor() as cursor:
        cursor.execute(TABLES.replace("{writer}", databases.role_name(SinkRole.WRITER)))
        cursor.execute("INSERT INTO unwelcome VALUES (%s)", [first.event_id])
        names = {"sink": by, "topic": TOPIC, "topic_id": TOPIC_ID}
        for event, status in ((discarded, "discarded"), (replayed, "replayed")):
            cursor.execute(LETTER, {**names, "id": event.event_id, "status": status})
    with closing(connect(databases, SinkRole.WRITER)) as connection:
        sink = sink_on(connection, STRATEGIES[by], projections_in(tmp_path, ORDERED + STATEMENT, "statement"))
        assert sink.apply(batch([first])) == Counts(rows=1, rejected=1)
        before = buffers(connection, databases)
        counts = sink.apply(batch([*some, late, discarded, replayed], start=1))
        read = buffers(connection, databases) - before
    assert counts == Counts(rows=count + 3, applied=count, duplicates=2, rejected=1)
    assert read < 21 * count + 150
