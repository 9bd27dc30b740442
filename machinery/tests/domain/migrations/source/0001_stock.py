"""Orders and items with their stock, and the views that the auditor reads."""

from __future__ import annotations

from outbox.migrations import execute, role

revision = "source_domain_0001"
down_revision = None
branch_labels = ("domain",)
depends_on = ("source_machinery_0001",)

UP = """
CREATE TABLE orders (
    id      uuid   PRIMARY KEY,
    version bigint NOT NULL -- how many events the order has had
);
CREATE VIEW source_orders AS SELECT id::text AS key, version FROM orders;
CREATE TABLE items (
    id      uuid   PRIMARY KEY,
    unit    text   NOT NULL CHECK (unit ~ '^[A-Z]{3}$'),
    stock   bigint NOT NULL, -- may fall below zero: a pick may be recorded before its receipt
    version bigint NOT NULL  -- how many movements have changed the stock
);

-- What `outbox check` compares the sinks with, and what `outbox rebuild` sets them to.
CREATE VIEW source_totals AS
    SELECT id::text AS key, stock::numeric AS total, version, unit FROM items;
"""


def upgrade() -> None:
    execute(UP)
    execute(f"GRANT SELECT, INSERT, UPDATE (version) ON orders TO {role('app')}")
    execute(f"GRANT SELECT ON source_orders TO {role('auditor')}")
    execute(f"GRANT SELECT, INSERT, UPDATE (stock, version) ON items TO {role('app')}")
    execute(f"GRANT SELECT ON source_totals TO {role('auditor')}")
