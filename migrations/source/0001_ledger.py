"""The ledger: accounts, transfers, and the view that the auditor reads."""

from __future__ import annotations

from alembic import op
from outbox.migrations import execute, role

revision = "source_domain_0001"
down_revision = None
branch_labels = ("domain",)
depends_on = ("source_machinery_0001",)

# The checks are the last line of defence: service/ledger.py refuses first, with a reason.
UP = """
CREATE TABLE accounts (
    id            uuid        PRIMARY KEY DEFAULT uuidv7(),
    kind          text        NOT NULL CHECK (kind IN ('user', 'system')),
    currency      text        NOT NULL CHECK (currency ~ '^[A-Z]{3}$'),
    balance_minor bigint      NOT NULL DEFAULT 0,
    version       bigint      NOT NULL DEFAULT 0,
    created_at    timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT user_accounts_are_covered CHECK (kind = 'system' OR balance_minor >= 0)
);

CREATE TABLE transfers (
    id              uuid        PRIMARY KEY,
    from_account_id uuid        NOT NULL REFERENCES accounts,
    to_account_id   uuid        NOT NULL REFERENCES accounts,
    amount_minor    bigint      NOT NULL CHECK (amount_minor > 0),
    currency        text        NOT NULL,
    created_at      timestamptz NOT NULL,
    CHECK (from_account_id <> to_account_id)
);

-- What `outbox check` compares the sinks with, and what `outbox rebuild` sets them to.
CREATE VIEW source_totals AS
    SELECT id::text AS key, balance_minor::numeric AS total, version, currency FROM accounts;
"""


def upgrade() -> None:
    execute(UP)
    execute(f"GRANT SELECT, INSERT, UPDATE (balance_minor, version) ON accounts TO {role('app')}")
    execute(f"GRANT SELECT, INSERT ON transfers TO {role('app')}")
    execute(f"GRANT SELECT ON source_totals TO {role('auditor')}")


def downgrade() -> None:
    op.execute("DROP VIEW source_totals; DROP TABLE transfers, accounts;")
