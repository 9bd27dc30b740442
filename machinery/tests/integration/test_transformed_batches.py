"""Large batches whose events have passed a transform, at the sink database, which needs no Spark."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from random import Random

import pyarrow as pa

from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole
from outbox.sink.batch import Batch, Returned
from outbox.sink.postgres.target import PostgresTarget
from outbox.sink.postgres.transform_staging import TransformStaging
from outbox.sink.spec import SinkSpec
from outbox.sink.values import ARROW_TYPES
from outbox.sink.writer import SinkWriter
from tests.support.made_events import DECODER, JOB, MAIN, Event, as_read, batch, fetch, nth_key, rows, sums, uuid7
from tests.support.sink_driver import Database

RANDOM = Random(6)  # noqa: S311
COUNT = 30_000  # of a batch. To compare each event with each returned row would take minutes
TIMEOUT_MS = 30_000


def events(count: int) -> list[Event]:
    return [Event(uuid7(RANDOM), nth_key(number % 3), 1, version=number + 1) for number in range(count)]


def staged(settings: Settings, sink: SinkWriter, some: Sequence[Event], job: int) -> Batch:
    """A batch that one task has read and another has staged after the transform, which has changed nothing."""
    staging, dsn = sink.staging, settings.dsn(SinkRole.WRITER)
    assert isinstance(staging, TransformStaging)
    passing = staging.passing_copier(dsn, MAIN.topics[0], job)
    decoded = list(passing(0, [as_read(*(one.record for one in some), partition=0)]))
    passed = (pa.concat_tables([*one.rows.values()]) for one in decoded)
    attempt, count = staging.returned_copier(dsn)(passed)
    start = job * COUNT
    whole = batch(some, start)
    return replace(whole, rows=rows([]), staged=staging.passed(dsn, job, 1), returned=Returned(None, [attempt], count))


def test_a_batch_is_applied_by_hashes_whatever_statistics_say(databases: Settings, database: Database) -> None:
    spec = SinkSpec("dedup", replace(JOB, transform="any:thing"), MAIN.strategy, MAIN.decoders, PostgresTarget())
    returned = {"event_id": pa.string(), "partition": pa.int32(), "offset": pa.int64()}
    returned |= {column.name: ARROW_TYPES[column.type] for column in DECODER.types[events(1)[0].name]}
    batches = [events(COUNT), events(COUNT)]
    with closing(connect(databases, SinkRole.WRITER)) as connection:
        sink = spec.target.writer(databases, connection, spec, fetch)
        sink.prepare(pa.schema(returned))
        with connection, connection.cursor() as cursor:
            cursor.execute("SET statement_timeout = %s", [TIMEOUT_MS])
        for number, some in enumerate(batches):
            prepared = staged(databases, sink, some, number)
            assert sink.apply(prepared).applied == COUNT
            with connection, connection.cursor() as cursor:  # as autovacuum does in the middle of a large backlog
                cursor.execute('ANALYZE staging."dedup/1/1/rows", staging."dedup/1/1/kept"')
        sink.close()
    assert database.totals() == sums([*batches[0], *batches[1]])
