"""The auditor sees an account's currency: `outbox rebuild` needs it for accounts that a sink does not have."""

from __future__ import annotations

from alembic import op

revision = "ledger_domain_0002"
down_revision = "ledger_domain_0001"
branch_labels = None
depends_on = None

# The machinery knows key, total and version; what follows is the domain's, and its sinks' rebuild.
UP = """
CREATE OR REPLACE VIEW audit_accounts AS
    SELECT id::text AS key, balance_minor::numeric AS total, version, currency FROM accounts;
"""
DOWN = """
DROP VIEW audit_accounts;
CREATE VIEW audit_accounts AS
    SELECT id::text AS key, balance_minor::numeric AS total, version FROM accounts;
GRANT SELECT ON audit_accounts TO ledger_auditor;
"""


def upgrade() -> None:
    op.execute(UP)


def downgrade() -> None:
    op.execute(DOWN)
