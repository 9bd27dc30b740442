"""The target in the sink database: the project's own tables, applied to in the sink's transaction."""

from __future__ import annotations

import pyarrow as pa
from psycopg2 import extensions

from outbox.base.settings import Settings
from outbox.sink.applying.postgres.applier import PostgresApplier
from outbox.sink.applying.postgres.returned import columns_of, storable
from outbox.sink.applying.postgres.transforming import TransformingApplier
from outbox.sink.applying.postgres.writer import PostgresWriter
from outbox.sink.decoding.records import Fetch
from outbox.sink.spec import SinkSpec, Target, Transformed
from outbox.sink.writer import SinkWriter


class PostgresTarget(Target):
    """Tables of the sink database."""

    def require_usable(self, spec: SinkSpec) -> None:
        PostgresApplier(spec)

    def writer(
        self,
        settings: Settings,  # noqa: ARG002
        connection: extensions.connection,
        spec: SinkSpec,
        fetch: Fetch,
    ) -> SinkWriter:
        return PostgresWriter(connection, spec, fetch)

    def applier(
        self,
        settings: Settings,  # noqa: ARG002
        spec: SinkSpec,
        transform: Transformed | None = None,
        *,
        dry_run: bool,
    ) -> PostgresApplier:
        if transform is None:
            return PostgresApplier(spec)
        returned = columns_of(transform.schema, spec.layout)
        return TransformingApplier(spec, returned, transform.apply, dry_run=dry_run)

    def storable(self, spec: SinkSpec, rows: pa.Table) -> pa.Table:
        return storable(rows, columns_of(rows.schema, spec.layout))
