"""Stock, orders and the activity of both, as each sink computes them, and the events that handlers were called for."""

from __future__ import annotations

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
CREATE TABLE handled_events (
    handler  text   NOT NULL,
    event_id uuid   NOT NULL, -- no key: a test sees what is written twice
    key      text   NOT NULL,
    version  bigint NOT NULL,
    place    bigint NOT NULL  -- among the handled events of the key
);
"""


def upgrade() -> None:
    execute(UP)
    execute(f"GRANT SELECT, INSERT, UPDATE ON stock, orders, activity TO {role('writer')}")
    execute(f"GRANT SELECT, INSERT ON handled_events TO {role('writer')}")
    execute(f"GRANT SELECT ON sink_totals TO {role('writer')}, {role('auditor')}")
    execute(f"GRANT SELECT ON orders, activity TO {role('auditor')}")
