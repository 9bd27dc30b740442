"""The stock of each item, as each sink computes it."""

from __future__ import annotations

from alembic import op

from outbox.migrations import execute, role

revision = "sink_domain_0001"
down_revision = None
branch_labels = ("domain",)
depends_on = ("sink_machinery_0001",)

UP = """
CREATE TABLE stock (
    sink       text        NOT NULL,
    item_id    uuid        NOT NULL,
    unit       text        NOT NULL,
    stock      numeric     NOT NULL, -- not bigint: no overflow may stop a sink that drifts
    version    bigint      NOT NULL, -- the highest version of the item that was applied
    events     bigint      NOT NULL, -- how many events were applied
    updated_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (sink, item_id)
) WITH (fillfactor = 70); -- rows are updated in place

-- What `outbox check` compares with the source.
CREATE VIEW sink_totals AS
    SELECT sink, item_id::text AS key, stock AS total, version FROM stock;
"""


def upgrade() -> None:
    execute(UP)
    execute(f"GRANT SELECT, INSERT, UPDATE ON stock TO {role('writer')}")
    execute(f"GRANT SELECT ON sink_totals TO {role('writer')}, {role('auditor')}")


def downgrade() -> None:
    op.execute("DROP VIEW sink_totals; DROP TABLE stock;")
