"""The cars in each garage, as the sink computes them."""

from __future__ import annotations

from alembic import op
from outbox.migrations import execute, role

revision = "sink_domain_0001"
down_revision = None
branch_labels = ("domain",)
depends_on = ("sink_machinery_0001",)

UP = """
CREATE TABLE garage_cars (
    sink    text    NOT NULL,
    garage  text    NOT NULL,
    cars    numeric NOT NULL,
    version bigint  NOT NULL, -- the highest version of the garage that was applied
    PRIMARY KEY (sink, garage)
) WITH (fillfactor = 70); -- rows are updated in place

-- What `outbox check` compares with the source.
CREATE VIEW sink_totals AS
    SELECT sink, garage AS key, cars AS total, version FROM garage_cars;
"""


def upgrade() -> None:
    execute(UP)
    execute(f"GRANT SELECT, INSERT, UPDATE ON garage_cars TO {role('writer')}")
    execute(f"GRANT SELECT ON sink_totals TO {role('writer')}, {role('auditor')}")


def downgrade() -> None:
    op.execute("DROP VIEW sink_totals; DROP TABLE garage_cars;")
