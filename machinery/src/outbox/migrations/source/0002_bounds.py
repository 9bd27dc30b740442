"""What the relay copies beside the payload is bounded too."""

from __future__ import annotations

from alembic import op

from outbox.migrations.migrate import execute

revision = "source_machinery_0002"
down_revision = "source_machinery_0001"

UP = """
-- The relay copies these into the key and the headers of a record. One that does not fit would stop the relay for
-- everybody. NOT VALID: it holds for new rows, and a longer row from before is the relay's by now.
SET LOCAL lock_timeout = '1s'; -- all inserts wait while this waits
ALTER TABLE outbox ADD CONSTRAINT columns_fit_a_record CHECK (
    greatest(octet_length(aggregatetype), octet_length(aggregateid), octet_length(type), octet_length(traceparent))
    <= 1000
) NOT VALID;
SET LOCAL lock_timeout = DEFAULT;
"""


def upgrade() -> None:
    execute(UP)


def downgrade() -> None:
    op.execute("ALTER TABLE outbox DROP CONSTRAINT columns_fit_a_record")
