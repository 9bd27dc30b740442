"""The outbox with its publication: all that `outbox migrate --only outbox` makes."""

from __future__ import annotations

from outbox.base.errors import Failure
from outbox.migrations.migrate import execute

revision = "source_machinery_0001"
down_revision = None
branch_labels = ("machinery",)

UP = """
-- A row is one event for Debezium's EventRouter; its columns are the ones that connect/outbox.json names.
CREATE TABLE outbox (
    id             uuid         PRIMARY KEY DEFAULT uuidv7(),
    aggregatetype  text         NOT NULL,
    aggregateid    text         NOT NULL,
    type           text         NOT NULL,
    schema_version smallint     NOT NULL DEFAULT 1,
    payload        jsonb        NOT NULL,
    occurred_at    timestamp(6) NOT NULL DEFAULT (clock_timestamp() AT TIME ZONE 'utc'), -- in UTC
    traceparent    text,
    -- Connect's producer takes records up to 1 MiB. A record that does not fit would stop the relay for everybody.
    CONSTRAINT payload_fits_a_record CHECK (octet_length(payload::text) <= 1000000)
);

-- Inserts only: the deletion of a relayed row is no event.
CREATE PUBLICATION outbox FOR TABLE outbox WITH (publish = 'insert');

-- The service writes events, and can neither read, change nor delete them.
GRANT INSERT ON outbox TO {app};
GRANT SELECT ON outbox TO {cdc}, {auditor};
-- `outbox prune` also inserts: its marker takes the way of every event.
GRANT SELECT, INSERT, DELETE ON outbox TO {pruner};
"""


def upgrade() -> None:
    execute(UP)


def downgrade() -> None:
    raise Failure(
        "the outbox and its publication are not dropped by a migration: events that are not relayed yet would be lost",
        "restore a backup, or write a migration that goes forward",
        code="migration-irreversible",
    )
