"""The sample's result: the balance of each account, as each sink computes it."""

from __future__ import annotations

from alembic import op

revision = "balances_domain_0001"
down_revision = None
branch_labels = ("domain",)
depends_on = None

UP = """
-- numeric, not bigint: a sink that drifts for ever must not be stopped by an overflow.
CREATE TABLE balances (
    sink          text        NOT NULL,
    account_id    uuid        NOT NULL,
    currency      text        NOT NULL,
    balance_minor numeric     NOT NULL,
    version       bigint      NOT NULL, -- the highest version of the account applied
    events        bigint      NOT NULL, -- how many events were applied
    updated_at    timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (sink, account_id)
) WITH (fillfactor = 70); -- rows are updated in place again and again

-- What `outbox check` compares with the ledger.
CREATE VIEW audit_balances AS
    SELECT sink, account_id::text AS key, balance_minor AS total, version FROM balances;

GRANT SELECT, INSERT, UPDATE ON balances TO balances_sink;
GRANT SELECT ON audit_balances TO balances_auditor;
"""


def upgrade() -> None:
    op.execute(UP)


def downgrade() -> None:
    op.execute("DROP VIEW audit_balances; DROP TABLE balances;")
