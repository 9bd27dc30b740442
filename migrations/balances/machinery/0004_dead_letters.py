"""What a replay of a dead letter needs to know of its record."""

from __future__ import annotations

from alembic import op

revision = "balances_machinery_0004"
down_revision = "balances_machinery_0003"
branch_labels = None
depends_on = None

UP = """
-- Status `replayed`: its event has been applied since, by a replay or because it came well; `discarded`: never will be.
ALTER TABLE dead_letters
    ADD topic_id    text NOT NULL DEFAULT '', -- unknown of letters from before
    ADD recorded_at timestamptz;              -- the record's timestamp
ALTER TABLE dead_letters ALTER topic_id DROP DEFAULT;
"""


def upgrade() -> None:
    op.execute(UP)


def downgrade() -> None:
    op.execute("ALTER TABLE dead_letters DROP topic_id, DROP recorded_at;")
