"""The target in the sink database: the project's own tables, applied to in the sink's transaction."""

from __future__ import annotations

from psycopg2 import extensions

from outbox.base.settings import Settings
from outbox.sink.postgres.applier import PostgresApplier
from outbox.sink.postgres.transforming import TransformingApplier
from outbox.sink.postgres.writer import PostgresWriter
from outbox.sink.spec import SinkSpec
from outbox.sink.target import Target
from outbox.sink.writer import SinkWriter


class PostgresTarget(Target):
    """Tables of the sink database."""

    def writer(self, settings: Settings, connection: extensions.connection, spec: SinkSpec) -> SinkWriter:  # noqa: ARG002
        return PostgresWriter(connection, spec)

    def applier(self, settings: Settings, spec: SinkSpec, *, dry_run: bool) -> PostgresApplier:
        if spec.job.transform is None:
            return PostgresApplier(spec)
        from outbox.sink.spark.session import session
        from outbox.sink.spark.transform import Transform, as_events

        transform = Transform(session(settings, [self]), spec)
        return TransformingApplier(
            spec,
            transform.columns,
            lambda topic, rows: transform.apply(as_events(rows, topic)),
            dry_run=dry_run,
        )
