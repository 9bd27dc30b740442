"""Couriers, and the view that the auditor reads."""

from __future__ import annotations

from alembic import op
from outbox.migrations import execute, role

revision = "source_domain_0001"
down_revision = None
branch_labels = ("domain",)
depends_on = ("source_machinery_0001",)

UP = """
CREATE TABLE couriers (
    id      text   PRIMARY KEY,
    zone    text,            -- NULL: signed off
    parcels bigint NOT NULL,
    version bigint NOT NULL  -- how many events the courier has had
);

-- What `outbox check` compares the sinks with.
CREATE VIEW source_totals AS
    SELECT id AS key, parcels::numeric AS total, version FROM couriers;
"""


def upgrade() -> None:
    execute(UP)
    execute(f"GRANT SELECT, INSERT, UPDATE (zone, parcels, version) ON couriers TO {role('app')}")
    execute(f"GRANT SELECT ON source_totals TO {role('auditor')}")


def downgrade() -> None:
    op.execute("DROP VIEW source_totals; DROP TABLE couriers;")
