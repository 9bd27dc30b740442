"""Staging of a large batch for a Delta table: rows in files beside it, their places and the dead letters in the sink
database (`outbox.sink.postgres.staging`), all of it under the attempt of the task.

The places are there for the transactions beside the MERGE: which events have dead letters that resolve them, and which
letters the batch closes. So the driver holds neither rows nor ids.

With a transform, the rows in files are those that it returns. The database has the place of each event, and that of
each row, which are joined there (`outbox.sink.postgres.transforming`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa
from psycopg2 import extensions

from outbox.sink.batch import Rows
from outbox.sink.lakehouse.files import Folder
from outbox.sink.postgres.staging import PLACE, Copier, Staging, copy_table
from outbox.sink.postgres.transform_staging import ReturnedCopier, TransformStaging, copy_returned
from outbox.sink.spec import SinkSpec


class LakehouseStaging(Staging):
    """Where the tasks of a running sink stage."""

    row_types = PLACE

    def __init__(self, spec: SinkSpec, epoch: int, folder: Callable[[], Folder]) -> None:
        """``folder`` makes the folder of the tasks' files if it is missing."""
        super().__init__(spec, epoch, with_days=True)
        self._folder = folder

    def copier(self, dsn: Mapping[str, str | int], topic: str) -> FileCopier:
        """The function that tasks run on records of a topic."""
        return FileCopier(**vars(super().copier(dsn, topic)), folder=self._folder())


@dataclass(frozen=True)
class FileCopier(Copier):
    """Decodes the records of one task, writes the rows into a file, and copies places and dead letters in one
    transaction, which is committed when the file is complete.
    """

    folder: Folder

    @contextmanager
    def writing(self, cursor: extensions.cursor, attempt: int) -> Iterator[Callable[[Rows], None]]:
        """A function that writes rows under an attempt; what it has written is complete at the end of the block."""
        with self.folder.writing(attempt, self.layout.schema) as write_file:

            def write(rows: Rows) -> None:
                table = self.layout.table(rows)
                copy_table(cursor, self.rows, table.select([*PLACE]), PLACE, attempt)
                write_file(table)

            yield write


class LakehouseTransformStaging(TransformStaging):
    """The same for a sink with a transform."""

    row_types = PLACE

    def __init__(self, spec: SinkSpec, epoch: int, returned: pa.Schema, folder: Callable[[], Folder]) -> None:
        """``returned`` are the columns of the rows that the transform returns; the others are those of
        `LakehouseStaging`.
        """
        super().__init__(spec, epoch, (), with_days=True)
        self._schema, self._folder = returned, folder

    def copier(self, dsn: Mapping[str, str | int], topic: str) -> PlaceCopier:
        """The function that tasks run on records of a topic."""
        return PlaceCopier(**vars(super().copier(dsn, topic)))

    def returned_copier(self, dsn: Mapping[str, str | int]) -> ReturnedFileCopier:
        """The function that tasks run on the rows that the transform returns."""
        return ReturnedFileCopier(**vars(super().returned_copier(dsn)), schema=self._schema, folder=self._folder())


@dataclass(frozen=True)
class PlaceCopier(Copier):
    """Decodes the records of one task, and copies the places of the events and the dead letters."""

    @contextmanager
    def writing(self, cursor: extensions.cursor, attempt: int) -> Iterator[Callable[[Rows], None]]:
        """A function that writes places under an attempt."""

        def write(rows: Rows) -> None:
            for of_event in rows.values():
                copy_returned(cursor, self.rows, of_event, (), attempt)

        yield write


@dataclass(frozen=True)
class ReturnedFileCopier(ReturnedCopier):
    """Writes the rows that a transform returns into a file, and copies their places, in one task."""

    schema: pa.Schema
    folder: Folder

    @contextmanager
    def writing(self, cursor: extensions.cursor, attempt: int) -> Iterator[Callable[[pa.Table], None]]:
        """A function that writes rows under an attempt; what it has written is complete at the end of the block."""
        with self.folder.writing(attempt, self.schema) as write_file:

            def write(rows: pa.Table) -> None:
                copy_returned(cursor, self.kept, rows, (), attempt)
                write_file(rows.cast(self.schema))

            yield write


def bounds(cursor: extensions.cursor) -> Sequence[str]:
    """The first and the last id in ``batch``, which is not empty."""
    cursor.execute(
        "(SELECT batch.event_id::text FROM pg_temp.outbox_batch AS batch ORDER BY batch.event_id LIMIT 1) UNION ALL "
        "(SELECT batch.event_id::text FROM pg_temp.outbox_batch AS batch ORDER BY batch.event_id DESC LIMIT 1)"
    )
    return [event_id for (event_id,) in cursor]
