"""Apply events that have passed a transform: the sink knows them as they were, and projections see what it returned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc
from psycopg2 import extensions

from outbox.events.schema import Column
from outbox.sink.applying.postgres.applier import PostgresApplier, names
from outbox.sink.applying.postgres.returned import join
from outbox.sink.decoding import binary
from outbox.sink.decoding.batch import Batch, Returned
from outbox.sink.decoding.binary import Encoded
from outbox.sink.decoding.layout import FAILURE, IS_FILTERED, KEY, VERSION, TransformedLayout
from outbox.sink.decoding.records import Fetch
from outbox.sink.remembering import fence
from outbox.sink.spec import SinkSpec
from outbox.sink.writer import Applied

TRANSFORM_FAILED = "transform failed"
DROP_FILTERED = f'DELETE FROM pg_temp.new_events AS new WHERE new."{IS_FILTERED}"'  # noqa: S608
REJECT_FAILED = f"""
WITH failed AS (
    DELETE FROM pg_temp.new_events AS new WHERE new."{FAILURE}" IS NOT NULL
    RETURNING new.event_id, new."{FAILURE}" AS detail
)
INSERT INTO pg_temp.rejections (event_id, reason, detail) SELECT failed.event_id, %s, failed.detail FROM failed
"""  # noqa: S608

Apply = Callable[[str, pa.Table], Returned]


class TransformingApplier(PostgresApplier):
    """Applies what a transform has returned of events."""

    def __init__(
        self, spec: SinkSpec, returned: Sequence[Column], transform: Apply | None = None, *, dry_run: bool = False
    ) -> None:
        """``returned`` are the columns that the transform returns. ``transform`` calls it with a topic and events
        of it, for a replay.
        """
        super().__init__(spec)
        self._shape = TransformedLayout(spec.layout, returned)
        self._columns, self._transform, self._dry_run = returned, transform, dry_run
        self._names = {
            topic: names(KEY, None if known.version is None else VERSION) for topic, known in self._known.items()
        }
        self._has_filtered = self._has_failed = False

    def rows(self, batch: Batch) -> Sequence[Encoded]:
        """The events of a batch, joined with what the transform returned of them.

        Raises Failure if the transform has broken a rule.
        """
        assert batch.chunk.events is not None, "what the transform was given"  # noqa: S101
        assert batch.returned is not None, "what the transform returned"  # noqa: S101
        known = self._known[batch.topic]
        rows = join(self.name, batch.chunk.events, batch.returned, self._columns, known)
        self._has_filtered, self._has_failed = pc.any(rows[IS_FILTERED]).as_py(), bool(batch.returned.failed)
        known_of_all = [name for name in rows.column_names if rows[name].null_count < rows.num_rows]
        return [binary.encode(rows.select(known_of_all), binary.types_of(self._shape.columns))]

    def replay(self, cursor: extensions.cursor, batch: Batch, fetch: Fetch, *, older_than_horizon: bool) -> Applied:
        """Let the events pass the transform, while no transaction is open, and apply what it returns."""
        assert self._transform is not None, "for a replay"  # noqa: S101
        assert batch.chunk.events is not None, "what the transform is given"  # noqa: S101
        with fence.between_transactions(cursor, self.name, keep=not self._dry_run):
            returned = self._transform(batch.topic, batch.chunk.events)
        transformed = replace(batch, returned=returned)
        return super().replay(cursor, transformed, fetch, older_than_horizon=older_than_horizon)

    def _leave_out(self, cursor: extensions.cursor) -> tuple[int, int]:
        filtered = failed = 0
        if self._has_filtered:
            cursor.execute(DROP_FILTERED)
            filtered = cursor.rowcount
        if self._has_failed:
            cursor.execute(REJECT_FAILED, [TRANSFORM_FAILED])
            failed = cursor.rowcount
        return filtered, failed
