"""Where the strategies `merge` and `offset-log` keep the events that they have applied."""

from __future__ import annotations

from alembic import op

revision = "balances_machinery_0002"
down_revision = "balances_machinery_0001"
branch_labels = None
depends_on = None

UP = """
-- Events by their id, landed before they are merged (strategy `merge`).
CREATE TABLE landed_events (
    sink     text  NOT NULL,
    event_id uuid  NOT NULL,
    event    jsonb NOT NULL, -- the staged columns
    PRIMARY KEY (sink, event_id)
);

-- Events by their place (strategy `offset-log`). By the topic's id, as a topic made again counts from 0 again.
CREATE TABLE event_log (
    sink      text   NOT NULL,
    topic_id  text   NOT NULL,
    partition int    NOT NULL,
    "offset"  bigint NOT NULL,
    event     jsonb  NOT NULL, -- the staged columns
    PRIMARY KEY (sink, topic_id, partition, "offset")
);

GRANT SELECT, INSERT ON landed_events, event_log TO balances_sink;
"""


def upgrade() -> None:
    op.execute(UP)


def downgrade() -> None:
    op.execute("DROP TABLE event_log, landed_events;")
