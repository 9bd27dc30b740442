"""Replays on purpose: where a sink begins to read anew."""

from __future__ import annotations

from alembic import op

revision = "balances_machinery_0003"
down_revision = "balances_machinery_0002"
branch_labels = None
depends_on = None

UP = """
-- A checkpoint belongs to a generation. Rewinding starts the next one, in the transaction that says where it begins:
-- no moment at which a checkpoint is gone and its replacement not there yet.
ALTER TABLE sinks ADD generation int NOT NULL DEFAULT 0;

CREATE TABLE rewinds (
    sink       text   NOT NULL,
    generation int    NOT NULL,
    topic      text   NOT NULL,
    partition  int    NOT NULL,
    "offset"   bigint NOT NULL, -- the first to be read
    made_at    timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (sink, generation, topic, partition)
);

GRANT SELECT, INSERT ON rewinds TO balances_sink;
"""


def upgrade() -> None:
    op.execute(UP)


def downgrade() -> None:
    op.execute("DROP TABLE rewinds; ALTER TABLE sinks DROP generation;")
