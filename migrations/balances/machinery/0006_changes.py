"""Where the strategy `changes` keeps which changes it has applied."""

from __future__ import annotations

from alembic import op

revision = "balances_machinery_0006"
down_revision = "balances_machinery_0005"
branch_labels = None
depends_on = None

UP = """
-- Changes of captured tables, by what tells them apart: all rows of a snapshot, for one, share an LSN.
CREATE TABLE processed_changes (
    sink       text   NOT NULL,
    table_name text   NOT NULL,
    pk         text   NOT NULL,
    lsn        bigint NOT NULL,
    op         text   NOT NULL,
    PRIMARY KEY (sink, table_name, pk, lsn, op)
);

GRANT SELECT, INSERT ON processed_changes TO balances_sink;
"""


def upgrade() -> None:
    op.execute(UP)


def downgrade() -> None:
    op.execute("DROP TABLE processed_changes;")
