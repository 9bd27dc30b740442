"""The tables of the projections."""

from __future__ import annotations

from alembic import op
from outbox.migrations import execute, role

revision = "sink_domain_0001"
down_revision = None
branch_labels = ("domain",)
depends_on = ("sink_machinery_0001",)

UP = """
CREATE TABLE order_states (
    sink     text    NOT NULL,
    order_id uuid    NOT NULL,
    status   text    NOT NULL,
    cents    numeric NOT NULL, -- what the order is worth
    pieces   numeric NOT NULL,
    version  bigint  NOT NULL, -- the step that was applied last
    PRIMARY KEY (sink, order_id)
) WITH (fillfactor = 70); -- rows are updated in place

CREATE TABLE stock_levels (
    sink    text    NOT NULL,
    product text    NOT NULL,
    pieces  numeric NOT NULL,
    version bigint  NOT NULL, -- the highest version of the product that was applied
    PRIMARY KEY (sink, product)
) WITH (fillfactor = 70);

CREATE TABLE sales_by_day (
    sink      text    NOT NULL,
    day       date    NOT NULL, -- in UTC
    product   text    NOT NULL,
    ordered   numeric NOT NULL, -- pieces
    cancelled numeric NOT NULL,
    PRIMARY KEY (sink, product, day)
) WITH (fillfactor = 70);

-- By it `outbox rebuild --from topic` shows what it changes.
CREATE VIEW sink_totals AS
    SELECT sink, order_id::text AS key, cents AS total, version FROM order_states
    UNION ALL
    SELECT sink, product, pieces, version FROM stock_levels;
"""


def upgrade() -> None:
    execute(UP)
    execute(f"GRANT SELECT, INSERT, UPDATE ON order_states, stock_levels, sales_by_day TO {role('writer')}")
    # A rebuild from the source replaces rows that differ.
    execute(f"GRANT DELETE ON order_states, stock_levels TO {role('writer')}")
    execute(f"GRANT SELECT ON sink_totals TO {role('writer')}")
    execute(f"GRANT SELECT ON order_states, stock_levels, sales_by_day TO {role('auditor')}")


def downgrade() -> None:
    op.execute("DROP VIEW sink_totals; DROP TABLE sales_by_day, stock_levels, order_states;")
