"""The sample's result: the balance of each account, as each sink computes it."""

from __future__ import annotations

from alembic import op
from outbox.migrations import execute, role

revision = "sink_domain_0001"
down_revision = None
branch_labels = ("domain",)
depends_on = ("sink_machinery_0001",)

UP = """
-- numeric, not bigint: a sink that drifts must not stop at an overflow.
CREATE TABLE balances (
    sink          text        NOT NULL,
    account_id    uuid        NOT NULL,
    currency      text        NOT NULL,
    balance_minor numeric     NOT NULL,
    version       bigint      NOT NULL, -- the highest version of the account that was applied
    events        bigint      NOT NULL, -- how many events were applied
    updated_at    timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (sink, account_id)
) WITH (fillfactor = 70); -- rows are updated in place again and again

-- What `outbox check` compares with the source.
CREATE VIEW sink_totals AS
    SELECT sink, account_id::text AS key, balance_minor AS total, version FROM balances;
"""


def upgrade() -> None:
    execute(UP)
    execute(f"GRANT SELECT, INSERT, UPDATE ON balances TO {role('writer')}")
    execute(f"GRANT SELECT ON sink_totals TO {role('writer')}, {role('auditor')}")


def downgrade() -> None:
    op.execute("DROP VIEW sink_totals; DROP TABLE balances;")
