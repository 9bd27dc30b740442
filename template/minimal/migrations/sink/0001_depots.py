"""The parcels of each depot, as each sink computes them."""

from __future__ import annotations

from alembic import op
from outbox.migrations import execute, role

revision = "sink_domain_0001"
down_revision = None
branch_labels = ("domain",)
depends_on = ("sink_machinery_0001",)

UP = """
CREATE TABLE depot_parcels (
    sink     text    NOT NULL,
    depot_id uuid    NOT NULL,
    parcels  numeric NOT NULL,
    version  bigint  NOT NULL, -- the highest version of the depot that was applied
    PRIMARY KEY (sink, depot_id)
) WITH (fillfactor = 70); -- rows are updated in place

-- What `outbox check` compares with the source.
CREATE VIEW sink_totals AS
    SELECT sink, depot_id::text AS key, parcels AS total, version FROM depot_parcels;
"""


def upgrade() -> None:
    execute(UP)
    execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON depot_parcels TO {role('writer')}")
    execute(f"GRANT SELECT ON sink_totals TO {role('writer')}, {role('auditor')}")
    execute(f"GRANT SELECT ON depot_parcels TO {role('auditor')}")


def downgrade() -> None:
    op.execute("DROP VIEW sink_totals; DROP TABLE depot_parcels;")
