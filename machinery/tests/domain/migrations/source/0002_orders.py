"""Orders of items, and the view with the state of each."""

from __future__ import annotations

from alembic import op

from outbox.migrations import execute, role

revision = "source_domain_0002"
down_revision = "source_domain_0001"
branch_labels = None
depends_on = None

UP = """
CREATE TABLE orders (
    id      uuid   PRIMARY KEY,
    version bigint NOT NULL -- how many events the order has had
);
CREATE VIEW source_orders AS SELECT id::text AS key, version FROM orders;
"""


def upgrade() -> None:
    execute(UP)
    execute(f"GRANT SELECT, INSERT, UPDATE (version) ON orders TO {role('app')}")
    execute(f"GRANT SELECT ON source_orders TO {role('auditor')}")


def downgrade() -> None:
    op.execute("DROP VIEW source_orders; DROP TABLE orders;")
