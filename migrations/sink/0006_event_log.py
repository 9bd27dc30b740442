"""The events of the sink `balances-offset-log`, under the place of each on its topic."""

from __future__ import annotations

from alembic import op
from outbox.migrations import execute, role

revision = "sink_domain_0006"
down_revision = "sink_domain_0005"
branch_labels = None
depends_on = None

UP = """
CREATE TABLE event_log (
    sink      text    NOT NULL,
    topic_id  text    NOT NULL,
    partition integer NOT NULL,
    "offset"  bigint  NOT NULL,
    event     jsonb   NOT NULL, -- the columns of the batch
    PRIMARY KEY (sink, topic_id, partition, "offset")
);
"""


def upgrade() -> None:
    execute(UP)
    execute(f"GRANT SELECT, INSERT ON event_log TO {role('writer')}")
    execute(f"GRANT SELECT ON event_log TO {role('auditor')}")
    execute(f"GRANT SELECT, DELETE ON event_log TO {role('pruner')}")


def downgrade() -> None:
    op.execute("DROP TABLE event_log")
