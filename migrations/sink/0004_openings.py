"""The sink `accounts` knows which opening of an account is the newest, so that a late one does not replace it."""

from __future__ import annotations

from alembic import op
from outbox.migrations import execute

revision = "sink_domain_0004"
down_revision = "sink_domain_0003"
branch_labels = None
depends_on = None

# Of an account that has been opened already, no opening is newer than what was applied last.
UP = """
ALTER TABLE accounts ADD opened_version bigint NOT NULL DEFAULT 0; -- of the event that kind, currency and label are of
UPDATE accounts SET opened_version = version WHERE kind IS NOT NULL;
"""


def upgrade() -> None:
    execute(UP)


def downgrade() -> None:
    op.execute("ALTER TABLE accounts DROP opened_version")
