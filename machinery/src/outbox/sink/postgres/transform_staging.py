"""Staging for a sink with a transform: tasks stage what they read, and other tasks what the transform returns of it.

Between the two there may be a shuffle, and Spark may run a share twice, so nobody knows which attempt of a share the
returned rows are from. All attempts of a share read the same: the first one that was read to its end counts.

Each copy is a transaction of its own, because none may stay open for as long as a transform takes.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

import msgspec
import psycopg2
import pyarrow as pa
from psycopg2 import extensions, sql
from psycopg2.extensions import make_dsn

from outbox.base.errors import Failure
from outbox.events.schema import Column
from outbox.sink.batch import Decoded, Staged
from outbox.sink.postgres.returned import as_columns
from outbox.sink.postgres.staging import Copier, Count, Staging, copy_table, definitions, types_of
from outbox.sink.records import Records, joined
from outbox.sink.spec import SinkSpec

ATTEMPT_BITS = 62  # of a random number: Spark may run a share twice within one attempt of a task
TABLES = """
CREATE UNLOGGED TABLE {kept} (outbox_attempt bigint NOT NULL, {definitions});
CREATE UNLOGGED TABLE {done} (job bigint, share int, staged jsonb NOT NULL, PRIMARY KEY (job, share));
"""
DONE = "INSERT INTO {done} (job, share, staged) VALUES (%s, %s, %s) ON CONFLICT DO NOTHING"
PASSED = "SELECT staged FROM {done} WHERE job = %s ORDER BY share"


class TransformStaging(Staging):
    """Beside events and dead records as every sink stages them: ``kept``, the rows that the transform returns, and
    ``done``, which attempt has read each share of a part to its end.
    """

    contents = (*Staging.contents, "kept", "done")

    def __init__(self, spec: SinkSpec, epoch: int, returned: Sequence[Column], *, with_days: bool) -> None:
        """``returned`` are the columns that the transform returns; the others are those of `Staging`."""
        super().__init__(spec, epoch, with_days=with_days)
        self._returned = returned
        self._jobs = itertools.count()

    def create_in(self, cursor: extensions.cursor) -> None:
        """The same in the caller's transaction."""
        super().create_in(cursor)
        cursor.execute(sql.SQL(TABLES).format(**self.names, definitions=definitions(types_of(self._returned))))

    def next_job(self) -> int:
        """A number for the tasks that read one part."""
        return next(self._jobs)

    def passing_copier(self, dsn: Mapping[str, str | int], topic: str, job: int) -> PassingCopier:
        """The function that tasks run on the records of one share of a part, by its number."""
        return PassingCopier(self.copier(dsn, topic), job, sql.SQL(DONE).format(**self.names))

    def returned_copier(self, dsn: Mapping[str, str | int]) -> ReturnedCopier:
        """The function that tasks run on the rows that the transform returns."""
        return ReturnedCopier(self.dsn(dsn), self.tables["kept"], self._returned)

    def passed(self, dsn: Mapping[str, str | int], job: int, shares: int) -> Staged:
        """What tasks have staged of so many shares. Raises Failure if one of them was not read to its end."""
        with closing(psycopg2.connect(make_dsn(None, **self.dsn(dsn)))) as connection, connection.cursor() as cursor:
            cursor.execute(sql.SQL(PASSED).format(**self.names), [job])
            found = [msgspec.convert(staged, Staged, strict=False) for (staged,) in cursor]
        if len(found) < shares:
            raise Failure(
                f"sink {self._sink}: its transform does not look at all events: {shares - len(found)} of {shares} "
                "shares of a batch were not read to their end",
                "use no `limit`, and nothing else that drops events without looking at them",
                code="transform-breaks-rule",
            )
        return Staged.together(found)


@dataclass(frozen=True)
class PassingCopier:
    """Decodes the records of a share, copies them and returns them. Runs in a Python worker of an executor."""

    copier: Copier
    job: int
    done: sql.Composed

    def __call__(self, share: int, read: Iterable[Records]) -> Iterator[Decoded]:
        """Copy and return the records of a share, part by part as they are read."""
        copier, attempt = self.copier, secrets.randbits(ATTEMPT_BITS)
        count = Count(attempt, with_days=copier.with_days)
        with closing(psycopg2.connect(make_dsn(None, **copier.dsn))) as connection, connection.cursor() as cursor:
            connection.autocommit = True
            with copier.writing(cursor, attempt) as write_rows:
                for records in joined(read, copier.decoder.at_once):
                    decoded = copier.decoder.decode(records)
                    write_rows(decoded.rows)
                    copier.copy_dead(cursor, attempt, decoded)
                    count.add(decoded)
                    yield decoded
            cursor.execute(self.done, [self.job, share, msgspec.json.encode(count.staged()).decode()])


@dataclass(frozen=True)
class ReturnedCopier:
    """Copies the rows that a transform returns, in one task. Runs in a Python worker of an executor."""

    dsn: Mapping[str, str | int]
    kept: sql.Identifier
    columns: Sequence[Column]

    def __call__(self, tables: Iterable[pa.Table]) -> tuple[int, int]:
        """Copy the rows; returns under which attempt, and how many. Raises ValueError for one that is refused."""
        attempt, count = secrets.randbits(ATTEMPT_BITS), 0
        with closing(psycopg2.connect(make_dsn(None, **self.dsn))) as connection, connection.cursor() as cursor:
            connection.autocommit = True
            with self.writing(cursor, attempt) as write_rows:
                for rows in tables:
                    write_rows(rows)
                    count += rows.num_rows
        return attempt, count

    @contextmanager
    def writing(self, cursor: extensions.cursor, attempt: int) -> Iterator[Callable[[pa.Table], None]]:
        """A function that writes rows under an attempt; what it has written is complete at the end of the block."""
        yield lambda rows: copy_returned(cursor, self.kept, as_columns(rows, self.columns), self.columns, attempt)


def copy_returned(
    cursor: extensions.cursor, into: sql.Composable, rows: pa.Table, columns: Sequence[Column], attempt: int
) -> None:
    """COPY the places of rows, and these columns, under an attempt. Raises ValueError for one that Postgres refuses."""
    types = types_of(columns)
    try:
        copy_table(cursor, into, rows.select([*types]), types, attempt)
    except psycopg2.DataError as error:
        raise ValueError(str(error).partition("\n")[0]) from error
