"""Orders, and the view that the auditor reads."""

from __future__ import annotations

from alembic import op
from outbox.migrations import execute, role

revision = "source_domain_0001"
down_revision = None
branch_labels = ("domain",)
depends_on = ("source_machinery_0001",)

UP = """
CREATE TABLE orders (id text PRIMARY KEY, status text NOT NULL, cents bigint NOT NULL, version bigint NOT NULL);
CREATE VIEW source_orders AS SELECT id AS key, cents::numeric AS total, version FROM orders;
"""


def upgrade() -> None:
    execute(UP)
    execute(f"GRANT SELECT, INSERT, UPDATE ON orders TO {role('app')}")
    execute(f"GRANT SELECT ON source_orders TO {role('auditor')}")


def downgrade() -> None:
    op.execute("DROP VIEW source_orders; DROP TABLE orders;")
