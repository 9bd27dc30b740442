"""The strategy `offset-log` is gone: `offsets` recognises the same repeats and stores nothing."""

from __future__ import annotations

from outbox.base.errors import Failure
from outbox.migrations.migrate import execute

revision = "sink_machinery_0006"
down_revision = "sink_machinery_0005"


def upgrade() -> None:
    execute("DROP TABLE event_log")


def downgrade() -> None:  # a downgrade stops here, so earlier migrations have none
    raise Failure(
        "a migration does not bring back the offsets that the strategy `offset-log` has logged",
        "restore a backup, or write a migration that goes forward",
        code="migration-irreversible",
    )
