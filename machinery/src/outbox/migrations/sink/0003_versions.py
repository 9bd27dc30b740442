"""Strategy `versions`: which versions of each key were applied."""

from __future__ import annotations

from outbox.migrations.migrate import execute

revision = "sink_machinery_0003"
down_revision = "sink_machinery_0002"

UP = """
-- Strategy `versions`: the versions of each key that a sink knows, as ranges. A history without gaps is one range. The
-- key comes first, because it decides most comparisons in the index, and those are by bytes, the cheapest order. The
-- free space lets an update stay in its page.
CREATE TABLE applied_versions (
    sink     text COLLATE "C" NOT NULL,
    topic    text COLLATE "C" NOT NULL,
    key      text COLLATE "C" NOT NULL,
    versions int8multirange   NOT NULL,
    PRIMARY KEY (key, topic, sink)
) WITH (fillfactor = 50);

GRANT SELECT, INSERT, UPDATE ON applied_versions TO {writer};
"""


def upgrade() -> None:
    execute(UP)
