"""Which events a balance had in it when it was taken from the ledger."""

from __future__ import annotations

from alembic import op

revision = "balances_domain_0002"
down_revision = "balances_domain_0001"
branch_labels = None
depends_on = None

UP = """
-- The account's events up to this version are in the balance that `outbox rebuild` took from the ledger. They may be
-- on their way to the sink yet, and are not counted again.
ALTER TABLE balances ADD base_version bigint NOT NULL DEFAULT 0;

CREATE OR REPLACE VIEW audit_balances AS
    SELECT sink, account_id::text AS key, balance_minor AS total, version, base_version FROM balances;
"""
DOWN = """
DROP VIEW audit_balances;
CREATE VIEW audit_balances AS
    SELECT sink, account_id::text AS key, balance_minor AS total, version FROM balances;
GRANT SELECT ON audit_balances TO balances_auditor;
ALTER TABLE balances DROP base_version;
"""


def upgrade() -> None:
    op.execute(UP)


def downgrade() -> None:
    op.execute(DOWN)
