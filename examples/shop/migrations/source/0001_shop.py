"""Stock and orders, and the views that the auditor reads."""

from __future__ import annotations

from alembic import op
from outbox.migrations import execute, role

revision = "source_domain_0001"
down_revision = None
branch_labels = ("domain",)
depends_on = ("source_machinery_0001",)

UP = """
CREATE TABLE stock (
    product text   PRIMARY KEY,
    pieces  bigint NOT NULL CHECK (pieces >= 0),
    version bigint NOT NULL -- how many movements it has had
);

CREATE TABLE orders (
    id         uuid        PRIMARY KEY,
    status     text        NOT NULL CHECK (status IN ('placed', 'cancelled')),
    cents      bigint      NOT NULL, -- the price of all lines
    version    bigint      NOT NULL, -- how many steps it has taken
    changed_at timestamptz NOT NULL  -- when it took the latest
);

CREATE TABLE order_lines (
    order_id uuid   NOT NULL REFERENCES orders,
    number   int    NOT NULL,
    product  text   NOT NULL REFERENCES stock,
    pieces   int    NOT NULL CHECK (pieces > 0),
    cents    bigint NOT NULL CHECK (cents > 0), -- the price of one piece
    PRIMARY KEY (order_id, number)
);

-- What `outbox check` compares the sinks with, and what `outbox rebuild` sets them to.
-- A cancelled order is worth nothing.
CREATE VIEW source_orders AS
    SELECT id::text AS key, CASE status WHEN 'cancelled' THEN 0 ELSE cents END::numeric AS total, version, status,
           (SELECT sum(pieces) FROM order_lines WHERE order_id = id) AS pieces
      FROM orders;
CREATE VIEW source_stock AS
    SELECT product AS key, pieces::numeric AS total, version FROM stock;
CREATE VIEW source_demand AS
    SELECT product AS key, sum(pieces) AS total
      FROM order_lines JOIN orders ON orders.id = order_id
     WHERE status <> 'cancelled'
     GROUP BY product;
"""


def upgrade() -> None:
    execute(UP)
    execute(f"GRANT SELECT, INSERT, UPDATE (pieces, version) ON stock TO {role('app')}")
    execute(f"GRANT SELECT, INSERT, UPDATE (status, version, changed_at) ON orders TO {role('app')}")
    execute(f"GRANT SELECT, INSERT ON order_lines TO {role('app')}")
    execute(f"GRANT SELECT ON source_orders, source_stock, source_demand TO {role('auditor')}")


def downgrade() -> None:
    op.execute("DROP VIEW source_orders, source_stock, source_demand; DROP TABLE order_lines, orders, stock;")
