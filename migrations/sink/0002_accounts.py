"""The result of the sink `accounts`: each account with its status, and what its transfers come to."""

from __future__ import annotations

from outbox.migrations import execute, role

revision = "sink_domain_0002"
down_revision = "sink_domain_0001"
branch_labels = None
depends_on = None

UP = """
-- Events of two topics make a row, and those of either may come first. Until an event of its life has come, an account
-- has no status; until its opening has come, no kind, currency and label.
CREATE TABLE accounts (
    sink           text        NOT NULL,
    account_id     uuid        NOT NULL,
    kind           text,
    currency       text,
    label          text,
    status         text,
    version        bigint      NOT NULL DEFAULT 0, -- the highest version of the account's life that was applied
    transfers      bigint      NOT NULL DEFAULT 0, -- in how many it took part
    turnover_minor numeric     NOT NULL DEFAULT 0, -- the sum of their amounts, whatever their direction
    updated_at     timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (sink, account_id)
) WITH (fillfactor = 70); -- rows are updated in place again and again

-- `outbox rebuild --from topic` says by it how the copy differs from the sink.
CREATE OR REPLACE VIEW sink_totals AS
    SELECT sink, account_id::text AS key, balance_minor AS total, version FROM balances
    UNION ALL
    SELECT sink, account_id::text, turnover_minor, NULL FROM accounts;
"""


DOWN = """
CREATE OR REPLACE VIEW sink_totals AS
    SELECT sink, account_id::text AS key, balance_minor AS total, version FROM balances;
DROP TABLE accounts;
"""


def upgrade() -> None:
    execute(UP)
    execute(f"GRANT SELECT, INSERT, UPDATE ON accounts TO {role('writer')}")
    execute(f"GRANT SELECT ON accounts, balances TO {role('auditor')}")


def downgrade() -> None:
    execute(f"REVOKE SELECT ON balances FROM {role('auditor')}")  # noqa: S608
    execute(DOWN)
