"""The result of the sink `turnover`: the money that was moved each day, by region and currency."""

from __future__ import annotations

from alembic import op
from outbox.migrations import execute, role

revision = "sink_domain_0003"
down_revision = "sink_domain_0002"
branch_labels = None
depends_on = None

UP = """
CREATE TABLE turnover (
    sink         text    NOT NULL,
    day          date    NOT NULL, -- of UTC
    region       text    NOT NULL,
    currency     text    NOT NULL,
    transfers    bigint  NOT NULL,
    amount_minor numeric NOT NULL, -- in minor units of the currency
    euro_cents   numeric NOT NULL,
    PRIMARY KEY (sink, day, region, currency)
) WITH (fillfactor = 70); -- rows are updated in place again and again
"""


def upgrade() -> None:
    execute(UP)
    execute(f"GRANT SELECT, INSERT, UPDATE ON turnover TO {role('writer')}")
    execute(f"GRANT SELECT ON turnover TO {role('auditor')}")


def downgrade() -> None:
    op.execute("DROP TABLE turnover;")
