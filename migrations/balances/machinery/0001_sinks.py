"""What every sink keeps beside its result: who drives it, how far it has read, what it has seen, what it set aside."""

from __future__ import annotations

from alembic import op

revision = "balances_machinery_0001"
down_revision = None
branch_labels = ("machinery",)
depends_on = None

UP = """
-- One row a sink. A driver adds one to the epoch when it starts; one that finds another than its own is superseded.
-- The counts are of all time, moved in the transaction that applies, so that no crash makes them wrong.
CREATE TABLE sinks (
    name       text   PRIMARY KEY,
    epoch      bigint NOT NULL,
    applied    bigint NOT NULL DEFAULT 0,
    duplicates bigint NOT NULL DEFAULT 0
);

-- How far each sink has applied each partition, written in the transaction that applies. topic_id tells a recreated
-- topic from the one that was read.
CREATE TABLE positions (
    sink        text   NOT NULL,
    topic       text   NOT NULL,
    partition   int    NOT NULL,
    topic_id    text   NOT NULL,
    next_offset bigint NOT NULL,
    PRIMARY KEY (sink, topic, partition)
);

-- The ids a sink has applied, a partition a day of the time inside the UUIDv7: inserts stay in a small, warm index
-- however long the history grows, and retention drops a day at a time.
CREATE TABLE processed_events (
    sink     text NOT NULL,
    event_id uuid NOT NULL,
    PRIMARY KEY (sink, event_id)
) PARTITION BY RANGE (event_id);

CREATE FUNCTION first_uuid_of(day date) RETURNS uuid
LANGUAGE sql IMMUTABLE STRICT
RETURN rpad(lpad(to_hex((extract(epoch FROM day) * 1000)::bigint), 12, '0'), 32, '0')::uuid;

CREATE FUNCTION partition_of(day date) RETURNS text
LANGUAGE sql STABLE STRICT
RETURN 'public.processed_events_' || to_char(day, 'YYYYMMDD');

-- Makes the partitions of processed_events that these days need and that are not there. Runs as its owner, as a sink
-- may not make tables. ATTACH lets other sinks go on reading and inserting meanwhile, which PARTITION OF would not.
CREATE FUNCTION ensure_processed_events(days date[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
DECLARE
    wanted date;
    part   text;
BEGIN
    IF EXISTS (SELECT FROM unnest(days) AS day WHERE to_regclass(public.partition_of(day)) IS NULL) THEN
        -- Of two sinks that miss the same day, the second waits here and then finds it made.
        PERFORM pg_advisory_xact_lock(hashtextextended('outbox: partitions of processed_events', 0));
        FOREACH wanted IN ARRAY days LOOP
            part := public.partition_of(wanted);
            CONTINUE WHEN to_regclass(part) IS NOT NULL;
            EXECUTE format('CREATE TABLE %s (LIKE public.processed_events)', part);
            EXECUTE format('ALTER TABLE public.processed_events ATTACH PARTITION %s FOR VALUES FROM (%L) TO (%L)',
                           part, public.first_uuid_of(wanted), public.first_uuid_of(wanted + 1));
        END LOOP;
    END IF;
END $$;

-- Events that could not be applied. identity is the event's id, or a hash of key, headers and value where there is
-- none: an event that comes again finds itself here and only moves last_seen_at. replayed: its event has been applied
-- since, by a replay or because it came well; discarded: it never will be.
CREATE TABLE dead_letters (
    sink          text        NOT NULL,
    identity      text        NOT NULL,
    topic         text        NOT NULL,
    topic_id      text        NOT NULL,
    partition     int         NOT NULL,
    "offset"      bigint      NOT NULL,
    key           bytea,
    headers       jsonb,       -- [{"key": …, "value": …}], in order; what is no text as "key_base64" or "value_base64"
    value         bytea,
    recorded_at   timestamptz, -- the record's timestamp
    event         jsonb,       -- the staged columns, of an event that was readable and that the projection refused
    event_id      uuid,
    reason        text        NOT NULL,
    detail        text        NOT NULL,
    status        text        NOT NULL DEFAULT 'open' CHECK (status IN ('open', 'replayed', 'discarded')),
    first_seen_at timestamptz NOT NULL DEFAULT now(),
    last_seen_at  timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (sink, identity)
);
CREATE INDEX dead_letters_open ON dead_letters (sink, first_seen_at) WHERE status = 'open';

GRANT SELECT, INSERT, UPDATE ON sinks, positions, dead_letters TO balances_sink;
GRANT SELECT, INSERT ON processed_events TO balances_sink;
GRANT SELECT ON sinks, positions, dead_letters TO balances_auditor;
REVOKE ALL ON FUNCTION ensure_processed_events FROM PUBLIC;
GRANT EXECUTE ON FUNCTION ensure_processed_events TO balances_sink;
"""

DOWN = """
DROP TABLE dead_letters, processed_events, positions, sinks;
DROP FUNCTION ensure_processed_events, partition_of, first_uuid_of;
"""


def upgrade() -> None:
    op.execute(UP)


def downgrade() -> None:
    op.execute(DOWN)
