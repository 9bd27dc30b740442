"""Many kinds of events: sinks read several topics, of which each numbers its keys; and what a person has decided."""

from __future__ import annotations

from outbox.migrations.migrate import execute

revision = "sink_machinery_0002"
down_revision = "sink_machinery_0001"

UP = """
-- Keys of different topics are different keys. Until now a sink had one topic.
ALTER TABLE base_versions ADD COLUMN topic text;
ALTER TABLE key_versions ADD COLUMN topic text;
UPDATE base_versions AS of_key SET topic = read.topic FROM positions AS read WHERE read.sink = of_key.sink;
UPDATE key_versions AS of_key SET topic = read.topic FROM positions AS read WHERE read.sink = of_key.sink;
DELETE FROM base_versions WHERE topic IS NULL;
DELETE FROM key_versions WHERE topic IS NULL;
ALTER TABLE base_versions DROP CONSTRAINT base_versions_pkey, ADD PRIMARY KEY (sink, topic, key);
ALTER TABLE key_versions DROP CONSTRAINT key_versions_pkey, ADD PRIMARY KEY (sink, topic, key);

-- Events that a sink has passed because it had not asked for them; `*` stands for those that were not declared.
CREATE TABLE skipped_events (
    sink  text NOT NULL,
    topic text NOT NULL,
    event text NOT NULL,
    PRIMARY KEY (sink, topic, event)
);

ALTER TABLE dead_letters
    ADD COLUMN event_type     text,     -- of a valid event, such as order.placed; null in letters from before
    ADD COLUMN schema_version smallint, -- the version whose columns `event` has
    ADD COLUMN resolution     text,     -- why it was discarded
    -- Whether it holds a valid event: for the pruner, which may not read the event.
    ADD COLUMN has_event      boolean GENERATED ALWAYS AS (event IS NOT NULL) STORED,
    -- skipped: valid by now, and the sink has not asked for it.
    DROP CONSTRAINT dead_letters_status_check,
    ADD CHECK (status IN ('open', 'replayed', 'discarded', 'skipped'));

ALTER TABLE sinks ADD COLUMN skipped bigint NOT NULL DEFAULT 0; -- events that it had not asked for

GRANT SELECT, INSERT, DELETE ON skipped_events TO {writer};
GRANT SELECT ON skipped_events TO {auditor};
GRANT SELECT (has_event) ON dead_letters TO {pruner};
"""


def upgrade() -> None:
    execute(UP)
