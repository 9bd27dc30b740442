"""The statements of accounts, which the handler `statements` writes (service/handlers.py)."""

from __future__ import annotations

from alembic import op
from outbox.migrations import execute, role

revision = "sink_domain_0007"
down_revision = "sink_domain_0006"
branch_labels = None
depends_on = None

UP = """
CREATE TABLE statement_lines (
    account_id    uuid    NOT NULL,
    line          bigint  NOT NULL, -- 1, 2, 3 and so on
    event_id      uuid    NOT NULL, -- no key: the handler is called once, and the soak sees if it was not
    transfer_id   uuid    NOT NULL,
    balance_minor numeric NOT NULL, -- behind the transfer
    PRIMARY KEY (account_id, line)
);
"""


def upgrade() -> None:
    execute(UP)
    execute(f"GRANT SELECT, INSERT ON statement_lines TO {role('writer')}")


def downgrade() -> None:
    op.execute("DROP TABLE statement_lines")
