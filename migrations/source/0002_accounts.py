"""Accounts have a life of their own: a label, a status, and events that say what happened to them.

An account that exists already was opened before such events were written. It has had none: its ``account_version`` is
0, and its first event will be the next change of its life, with version 1. No event is written for it here, because a
migration that inserts a row per account into the outbox would be one long transaction. `outbox rebuild accounts --from
source` tells a sink of these accounts.
"""

from __future__ import annotations

from alembic import op
from outbox.migrations import execute, role

revision = "source_domain_0002"
down_revision = "source_domain_0001"
branch_labels = None
depends_on = None

UP = """
ALTER TABLE accounts
    ADD COLUMN label           text   NOT NULL DEFAULT '' CHECK (char_length(label) <= 100),
    ADD COLUMN status          text   NOT NULL DEFAULT 'open' CHECK (status IN ('open', 'frozen', 'closed')),
    ADD COLUMN account_version bigint NOT NULL DEFAULT 0, -- how many events of its life it has had
    ADD CONSTRAINT closed_accounts_are_empty CHECK (status <> 'closed' OR balance_minor = 0);

-- What `outbox check` and `outbox rebuild` read of an account's life, and of its transfers as the transfers have them.
CREATE VIEW source_accounts AS
    SELECT id::text AS key, account_version AS version, kind, accounts.currency, label, status,
           count(amount_minor) AS transfers, coalesce(sum(amount_minor), 0) AS turnover
      FROM accounts
      LEFT JOIN (SELECT from_account_id AS id, amount_minor FROM transfers
                 UNION ALL
                 SELECT to_account_id, amount_minor FROM transfers) AS moved USING (id)
     GROUP BY id;
"""

DOWN = """
DROP VIEW source_accounts;
ALTER TABLE accounts
    DROP CONSTRAINT closed_accounts_are_empty,
    DROP COLUMN label,
    DROP COLUMN status,
    DROP COLUMN account_version;
"""


def upgrade() -> None:
    execute(UP)
    execute(f"GRANT UPDATE (status, account_version) ON accounts TO {role('app')}")
    execute(f"GRANT SELECT ON source_accounts TO {role('auditor')}")


def downgrade() -> None:
    op.execute(DOWN)
