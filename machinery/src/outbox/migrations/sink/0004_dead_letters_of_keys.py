"""The dead letters of a key are found without a look at all others."""

from __future__ import annotations

from outbox.migrations.migrate import execute

revision = "sink_machinery_0004"
down_revision = "sink_machinery_0003"

UP = """
-- By a hash, because a foreign record may have a key that is too long for an index. The status is in the expression and
-- no condition of the index: a query with that condition could use the other index of open letters, and read them all.
CREATE INDEX dead_letters_of_key ON dead_letters ((CASE WHEN status = 'open' THEN sha256(key) END));
"""


def upgrade() -> None:
    execute(UP)
