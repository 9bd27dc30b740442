"""The outbox and its publication."""

from __future__ import annotations

from alembic import op

from outbox.errors import Failure

revision = "ledger_machinery_0001"
down_revision = None
branch_labels = ("machinery",)
depends_on = None


def upgrade() -> None:
    # A row is one event for Debezium's EventRouter; its columns are the ones that connect/outbox.json names.
    # occurred_at becomes the record's timestamp, for which Debezium wants a column without time zone: it is UTC.
    op.execute("""
        CREATE TABLE outbox (
            id             uuid         PRIMARY KEY DEFAULT uuidv7(),
            aggregatetype  text         NOT NULL,
            aggregateid    text         NOT NULL,
            type           text         NOT NULL,
            schema_version smallint     NOT NULL DEFAULT 1,
            payload        jsonb        NOT NULL,
            occurred_at    timestamp(6) NOT NULL DEFAULT (clock_timestamp() AT TIME ZONE 'utc'),
            traceparent    text,
            -- Connect's producer takes records up to 1 MiB; one that does not fit would stop the relay for everybody.
            CONSTRAINT payload_fits_a_record CHECK (octet_length(payload::text) <= 1000000)
        )
    """)
    # Inserts only: pruning relayed rows is no event.
    op.execute("CREATE PUBLICATION outbox FOR TABLE outbox WITH (publish = 'insert')")

    # The service writes events and cannot read, change or take back any.
    op.execute("GRANT INSERT ON outbox TO ledger_app")
    op.execute("GRANT SELECT ON outbox TO ledger_cdc")
    op.execute("GRANT SELECT, DELETE ON outbox TO ledger_pruner")
    # Readiness compares the schema with the code.
    op.execute("GRANT SELECT ON alembic_version TO ledger_app")


def downgrade() -> None:
    raise Failure(
        "the outbox and its publication are not dropped by a migration: what is not relayed yet would be lost",
        "restore a backup, or write a migration that goes forward",
    )
