"""How often the sink `balances-naive-logged` has applied each event, so that its drift can be explained."""

from __future__ import annotations

from alembic import op
from outbox.migrations import execute, role

revision = "sink_domain_0005"
down_revision = "sink_domain_0004"
branch_labels = None
depends_on = None

UP = """
CREATE TABLE applied_events (
    sink     text   NOT NULL,
    event_id uuid   NOT NULL,
    times    bigint NOT NULL,
    PRIMARY KEY (sink, event_id)
);
"""


def upgrade() -> None:
    execute(UP)
    execute(f"GRANT SELECT, INSERT, UPDATE ON applied_events TO {role('writer')}")
    execute(f"GRANT SELECT ON applied_events TO {role('auditor')}")


def downgrade() -> None:
    op.execute("DROP TABLE applied_events")
