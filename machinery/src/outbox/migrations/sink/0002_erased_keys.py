"""The keys whose data `outbox erase` has removed: nothing may bring them back."""

from __future__ import annotations

from outbox.base.errors import Failure
from outbox.migrations import grants
from outbox.migrations.migrate import execute, grant

revision = "sink_machinery_0002"
down_revision = "sink_machinery_0001"
branch_labels = None

ERASED_KEYS = """
-- A hash stands for the key. Sinks leave out its events up to `until`, and rebuilds from the source its state up to
-- `version`. What the service writes of the key afterwards is applied.
CREATE TABLE erased_keys (
    topic     text        NOT NULL,
    key_hash  bytea       NOT NULL, -- sha256 of the record's key
    until     uuid        NOT NULL, -- the highest id of an event from before
    version   bigint,               -- the highest version that the source knew, if any
    erased_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (topic, key_hash)
);
"""


def upgrade() -> None:
    execute(ERASED_KEYS)
    grant(grants.ERASED_KEYS)


def downgrade() -> None:
    raise Failure("erased_keys is not dropped: a rebuild would bring back what was erased", "write a migration forward")
