"""The events that the handlers were called for."""

from __future__ import annotations

from alembic import op

from outbox.migrations import execute, role

revision = "sink_domain_0003"
down_revision = "sink_domain_0002"
branch_labels = None
depends_on = None

UP = """
CREATE TABLE handled_events (
    handler  text   NOT NULL,
    event_id uuid   NOT NULL, -- no key: a test sees what is written twice
    key      text   NOT NULL,
    version  bigint NOT NULL,
    place    bigint NOT NULL  -- among the handled events of the key
);
"""


def upgrade() -> None:
    execute(UP)
    execute(f"GRANT SELECT, INSERT ON handled_events TO {role('writer')}")


def downgrade() -> None:
    op.execute("DROP TABLE handled_events")
