"""Sinks count the events that their transform leaves out."""

from __future__ import annotations

from outbox.migrations.migrate import execute

revision = "sink_machinery_0005"
down_revision = "sink_machinery_0004"


def upgrade() -> None:
    execute("ALTER TABLE sinks ADD COLUMN filtered bigint NOT NULL DEFAULT 0; -- events that its transform left out")
