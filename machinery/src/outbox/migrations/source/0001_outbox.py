"""The outbox with its publication: with its grants, all that `outbox migrate --only outbox` makes.

`outbox migrate` adds the CHECK for declared events, and repairs CHECKs, publication and grants at each run.
"""

from __future__ import annotations

from outbox.migrations import declared, publication
from outbox.migrations.migrate import execute

revision = "source_machinery_0001"
down_revision = None
branch_labels = ("machinery",)

UP = f"""
-- A row is one event for Debezium's EventRouter; its columns are the ones that connect/outbox.json names.
CREATE TABLE public.outbox (
    id             uuid         PRIMARY KEY DEFAULT uuidv7(),
    aggregatetype  text         NOT NULL,
    aggregateid    text         NOT NULL,
    type           text         NOT NULL,
    schema_version smallint     NOT NULL DEFAULT 1,
    payload        jsonb        NOT NULL,
    occurred_at    timestamp(6) NOT NULL DEFAULT (clock_timestamp() AT TIME ZONE 'utc'), -- in UTC
    traceparent    text,
    {declared.BOUNDS}
);

{publication.CREATE};
"""


def upgrade() -> None:
    execute(UP)
