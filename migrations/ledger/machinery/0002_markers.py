"""What `outbox prune` needs: its marker goes the way of every event."""

from __future__ import annotations

from alembic import op

revision = "ledger_machinery_0002"
down_revision = "ledger_machinery_0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("GRANT INSERT ON outbox TO ledger_pruner")


def downgrade() -> None:
    op.execute("REVOKE INSERT ON outbox FROM ledger_pruner")
