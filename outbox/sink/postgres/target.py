"""The target in the sink database: the project's own tables, applied to in the sink's transaction."""

from __future__ import annotations

from collections.abc import Sequence

from psycopg2 import extensions

from outbox.base.settings import Settings
from outbox.events.schema import Column
from outbox.sink.postgres.applier import PostgresApplier
from outbox.sink.postgres.transforming import TransformingApplier
from outbox.sink.postgres.writer import PostgresWriter
from outbox.sink.spec import SinkSpec
from outbox.sink.target import Target, Transform
from outbox.sink.writer import SinkWriter


class PostgresTarget(Target):
    """Tables of the sink database."""

    def writer(self, settings: Settings, connection: extensions.connection, spec: SinkSpec) -> SinkWriter:  # noqa: ARG002
        return PostgresWriter(connection, spec)

    def applier(self, settings: Settings, spec: SinkSpec, *, dry_run: bool) -> PostgresApplier:  # noqa: ARG002
        return PostgresApplier(spec)

    def transforming_applier(
        self, spec: SinkSpec, returned: Sequence[Column], transform: Transform, *, dry_run: bool
    ) -> TransformingApplier:
        return TransformingApplier(spec, returned, transform, dry_run=dry_run)
