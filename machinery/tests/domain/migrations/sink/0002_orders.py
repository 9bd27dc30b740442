"""Orders, and the activity of items and orders, as each sink computes them."""

from __future__ import annotations

from alembic import op

from outbox.migrations import execute, role

revision = "sink_domain_0002"
down_revision = "sink_domain_0001"
branch_labels = None
depends_on = None

UP = """
CREATE TABLE orders (
    sink         text    NOT NULL,
    order_id     uuid    NOT NULL,
    item_id      uuid, -- with quantity and unit: null while only the cancellation is known
    quantity     bigint,
    unit         text,
    is_cancelled boolean NOT NULL DEFAULT false,
    reason       text,
    version      bigint  NOT NULL, -- the highest version of the order that was applied
    PRIMARY KEY (sink, order_id)
);
CREATE TABLE activity (
    sink      text   NOT NULL,
    aggregate text   NOT NULL,
    key       uuid   NOT NULL,
    events    bigint NOT NULL,
    kinds     text[] NOT NULL,
    PRIMARY KEY (sink, aggregate, key)
);
"""


def upgrade() -> None:
    execute(UP)
    execute(f"GRANT SELECT, INSERT, UPDATE ON orders, activity TO {role('writer')}")
    execute(f"GRANT SELECT ON orders, activity TO {role('auditor')}")


def downgrade() -> None:
    op.execute("DROP TABLE orders, activity;")
