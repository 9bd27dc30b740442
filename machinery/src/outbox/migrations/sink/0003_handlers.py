"""Calls of handlers that have begun: an event whose call never returns must not stop those behind it."""

from __future__ import annotations

from outbox.base.errors import Failure
from outbox.migrations.migrate import execute

revision = "sink_machinery_0003"
down_revision = "sink_machinery_0002"
branch_labels = None

CALLS = """
-- By topic and partition the offset up to which a handler may have begun to call its function, without an end; and how
-- often in a row a start has found such calls.
ALTER TABLE sinks ADD COLUMN unfinished jsonb NOT NULL DEFAULT '{}', ADD COLUMN interruptions int NOT NULL DEFAULT 0;
-- How often a handler has called its function again for the event: counted before the call.
ALTER TABLE dead_letters ADD COLUMN retries int NOT NULL DEFAULT 0;
"""


def upgrade() -> None:
    execute(CALLS)


def downgrade() -> None:
    raise Failure("the counts of a handler's calls are not dropped", "write a migration that goes forward")
