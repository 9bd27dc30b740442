"""The target in the sink database: the project's own tables. One batch is one transaction.

In this order, and all or nothing: the sink's lock and epoch; the positions that the batch must continue from; dead
letters of records that are no events; the rows, but for those that a dead letter has resolved; strategy, refusals and
projections (`outbox.sink.applying.postgres.applier`); the new positions.

If the process ends anywhere before the commit, nothing has happened. If it ends after, the reader does not know of the
commit and delivers the same offsets again, maybe cut into other batches: that is the strategy's case.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import date
from functools import partial

from outbox.base.heavy import extensions, pa
from outbox.base.settings import Settings
from outbox.sink.applying.postgres.applier import PostgresApplier
from outbox.sink.applying.postgres.transforming import TransformingApplier, columns_of
from outbox.sink.decoding.batch import Batch, Returned
from outbox.sink.decoding.binary import Encoded
from outbox.sink.decoding.records import Fetch
from outbox.sink.remembering import dead_letters, strategy
from outbox.sink.spec import SinkSpec, Target, Transformed
from outbox.sink.writer import Applied, Counts, SinkWriter

RENEWAL_S = 3600.0  # of the temporary tables; Postgres begins to act on an age of 200 million transactions


class PostgresWriter(SinkWriter):
    """A sink whose result is in the database that it is fenced in."""

    _applier: PostgresApplier

    def __init__(
        self,
        connection: extensions.connection,
        spec: SinkSpec,
        fetch: Fetch,
        applier_of: Callable[[Transformed | None], PostgresApplier] | None = None,
    ) -> None:
        """Acquire the fence and prepare the session. ``fetch`` reads the records of dead letters from their topic.
        ``applier_of`` makes the applier, of a sink with a transform when its columns are known; by default one that
        runs the sink's projections.
        """
        super().__init__(connection, spec.asked)
        self._spec, self._fetch = spec, fetch
        self._applier_of = applier_of or partial(applier, spec)
        self._ensured = set[date]()
        if spec.job.transform is None:
            self._prepare(None)

    def prepare(self, returned: pa.Schema) -> None:
        self._prepare(Transformed(returned, lambda _, events: Returned(events)))

    def _prepare(self, transform: Transformed | None) -> None:
        """Make the tables of the session."""
        self._applier = self._applier_of(transform)
        with self._errors("does not let the sink start"), self._connection, self._connection.cursor() as cursor:
            self._applier.prepare(cursor)
        self._renewed_at = time.monotonic()

    def _apply(self, batch: Batch) -> Counts:
        rows = self._prepared(batch)
        with self._connection, self._connection.cursor() as cursor:
            return self._apply_rows(cursor, batch, rows)

    def _prepared(self, batch: Batch) -> Sequence[Encoded]:
        """The rows of a batch, whose ids have partitions then."""
        # Before the transaction that applies: a partition costs locks, and other sinks may wait for it.
        missing = {*batch.chunk.days} - self._ensured
        strategy.ensure_partitions(self._connection, missing)
        self._ensured |= missing  # one that is dropped later is below the horizon, where nothing is applied
        return self._applier.rows(batch) if batch.chunk.count else ()

    def _apply_rows(self, cursor: extensions.cursor, batch: Batch, encoded: Sequence[Encoded]) -> Counts:
        self._continue(cursor, batch)
        self._renew(cursor)
        # First, because an ordered projection looks here for what an event must wait for.
        dead_letters.insert(cursor, self.name, batch.topic, batch.topic_id, batch.chunk)
        applied = Applied(0, 0)
        if count := batch.chunk.count:
            self._applier.take(cursor, encoded)
            dead_letters.drop_resolved(cursor, self.name, batch.topic, batch.topic_id, count=count, fetch=self._fetch)
            applied = self._applier.apply(cursor, batch.topic, batch.topic_id, self._fetch)
        return self._move_past(cursor, batch, applied)

    def _renew(self, cursor: extensions.cursor) -> None:
        """Renew the temporary tables once in a while, in the caller's transaction."""
        if time.monotonic() - self._renewed_at >= RENEWAL_S:
            self._applier.renew(cursor)
            self._renewed_at = time.monotonic()


def applier(spec: SinkSpec, transform: Transformed | None = None) -> PostgresApplier:
    """The applier that runs a sink's projections."""
    if transform is None:
        return PostgresApplier(spec)
    return TransformingApplier(spec, columns_of(transform.schema, spec.layout), transform.apply)


class PostgresTarget(Target):
    """Tables of the sink database."""

    def require_usable(self, spec: SinkSpec) -> None:
        PostgresApplier(spec)

    def writer(self, settings: Settings, connection: extensions.connection, spec: SinkSpec, fetch: Fetch) -> SinkWriter:
        del settings
        return PostgresWriter(connection, spec, fetch)

    def applier(self, settings: Settings, spec: SinkSpec, transform: Transformed | None = None) -> PostgresApplier:
        del settings
        return applier(spec, transform)
