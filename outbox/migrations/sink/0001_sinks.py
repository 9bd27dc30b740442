"""What every sink keeps beside its result: its driver, its positions, what it has applied, what it has set aside."""

from __future__ import annotations

from outbox.base.errors import Failure
from outbox.migrations.migrate import execute

revision = "sink_machinery_0001"
down_revision = None
branch_labels = ("machinery",)
depends_on = None

SINKS = """
-- One row per sink. A driver adds one to the epoch when it starts; a driver that finds another epoch is superseded.
-- The counts are of all time. They change in the transaction that applies, so no crash makes them wrong.
CREATE TABLE sinks (
    name       text   PRIMARY KEY,
    epoch      bigint NOT NULL,
    generation int    NOT NULL DEFAULT 0, -- of its checkpoint
    applied    bigint NOT NULL DEFAULT 0,
    duplicates bigint NOT NULL DEFAULT 0
);

-- How far each sink has applied each partition, written in the transaction that applies. topic_id distinguishes a
-- recreated topic from the one that was read.
CREATE TABLE positions (
    sink        text   NOT NULL,
    topic       text   NOT NULL,
    partition   int    NOT NULL,
    topic_id    text   NOT NULL,
    next_offset bigint NOT NULL,
    PRIMARY KEY (sink, topic, partition)
);

-- Where each checkpoint begins. A rewind starts the next generation in the transaction that says where it begins: there
-- is no moment at which a checkpoint is gone and its replacement is missing.
CREATE TABLE checkpoint_generations (
    sink       text   NOT NULL,
    generation int    NOT NULL,
    topic      text   NOT NULL,
    partition  int    NOT NULL,
    "offset"   bigint NOT NULL, -- the first to be read
    made_at    timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (sink, generation, topic, partition)
);

-- Keys whose state was taken from the source at a version. Events up to that version are already in it, so they are
-- duplicates, whatever the strategy knows of them.
CREATE TABLE base_versions (
    sink    text   NOT NULL,
    key     text   NOT NULL,
    version bigint NOT NULL,
    PRIMARY KEY (sink, key)
);

-- Events that could not be applied. identity is the event's id, or a hash of key, headers and value if it has none: a
-- repeated event finds itself here and only moves last_seen_at.
CREATE TABLE dead_letters (
    sink          text        NOT NULL,
    identity      text        NOT NULL,
    topic         text        NOT NULL,
    topic_id      text        NOT NULL,
    partition     int         NOT NULL,
    "offset"      bigint      NOT NULL,
    key           bytea,
    headers       jsonb,       -- [{"key": …, "value": …}], in order; bytes that are no text as key_base64, value_base64
    value         bytea,
    event         jsonb,       -- the columns of an event that was valid and that strategy or projection refused
    event_id      uuid,
    reason        text        NOT NULL,
    detail        text        NOT NULL,
    -- replayed: the event was applied since, by a replay or by a valid record; discarded: it never will be.
    status        text        NOT NULL DEFAULT 'open' CHECK (status IN ('open', 'replayed', 'discarded')),
    recorded_at   timestamptz, -- the record's timestamp
    first_seen_at timestamptz NOT NULL DEFAULT now(),
    last_seen_at  timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (sink, identity)
);
CREATE INDEX dead_letters_open ON dead_letters (sink, first_seen_at) WHERE status = 'open';

-- Where executors copy the rows of large batches (outbox/sink/postgres/staging.py): unlogged tables of running sinks.
CREATE SCHEMA staging;
GRANT USAGE, CREATE ON SCHEMA staging TO {writer};
"""

STRATEGIES = """
-- Strategy `dedup`: the ids a sink has applied, one partition per day of the time inside the UUIDv7. Inserts stay in a
-- small, warm index however long the history grows, and retention drops a day at a time.
CREATE TABLE processed_events (
    sink     text NOT NULL,
    event_id uuid NOT NULL,
    PRIMARY KEY (sink, event_id)
) PARTITION BY RANGE (event_id);

-- Strategy `upsert`: the highest version of each key that was applied.
CREATE TABLE key_versions (
    sink    text   NOT NULL,
    key     text   NOT NULL,
    version bigint NOT NULL,
    PRIMARY KEY (sink, key)
) WITH (fillfactor = 70);

-- Strategy `merge`: events by their id.
CREATE TABLE landed_events (
    sink     text  NOT NULL,
    event_id uuid  NOT NULL,
    event    jsonb NOT NULL, -- the columns of the batch
    PRIMARY KEY (sink, event_id)
);

-- Strategy `offset-log`: events by their place. The topic's id is in the key because a recreated topic counts from 0.
CREATE TABLE event_log (
    sink      text   NOT NULL,
    topic_id  text   NOT NULL,
    partition int    NOT NULL,
    "offset"  bigint NOT NULL,
    event     jsonb  NOT NULL, -- the columns of the batch
    PRIMARY KEY (sink, topic_id, partition, "offset")
);

-- Strategy `changes`: changes of captured tables. All rows of a snapshot share an LSN, so the LSN alone is no key.
CREATE TABLE processed_changes (
    sink       text   NOT NULL,
    table_name text   NOT NULL,
    pk         text   NOT NULL,
    lsn        bigint NOT NULL,
    op         text   NOT NULL,
    PRIMARY KEY (sink, table_name, pk, lsn, op)
);
"""

RETENTION = """
-- The deduplication horizon. Ids below it are forgotten, so an event below it is set aside and not applied.
CREATE TABLE dedup_horizon (
    horizon   uuid        NOT NULL,
    raised_at timestamptz NOT NULL DEFAULT now(),
    one       boolean     NOT NULL DEFAULT true PRIMARY KEY CHECK (one) -- one row
);
INSERT INTO dedup_horizon (horizon) VALUES ('00000000-0000-0000-0000-000000000000');

CREATE FUNCTION first_uuid_of(day date) RETURNS uuid
LANGUAGE sql IMMUTABLE STRICT
RETURN rpad(lpad(to_hex((extract(epoch FROM day) * 1000)::bigint), 12, '0'), 32, '0')::uuid;

CREATE FUNCTION partition_of(day date) RETURNS text
LANGUAGE sql STABLE STRICT
RETURN 'public.processed_events_' || to_char(day, 'YYYYMMDD');

-- The days of processed_events: the ids of each are below its bound. Rows are as of the last ANALYZE, if any.
CREATE VIEW processed_days AS
    SELECT part.oid::regclass::text AS name,
           substring(pg_get_expr(part.relpartbound, part.oid) FROM $$TO \\('([0-9a-f-]+)'\\)$$)::uuid AS bound,
           nullif(part.reltuples, -1)::bigint AS estimated_rows,
           pg_total_relation_size(part.oid) AS bytes
      FROM pg_inherits JOIN pg_class AS part ON part.oid = inhrelid
     WHERE inhparent = 'public.processed_events'::regclass;

-- Makes the missing partitions of processed_events for these days, and none below the horizon. It runs as its owner
-- because a sink may not make tables. ATTACH lets other sinks read and insert meanwhile; PARTITION OF would not.
CREATE FUNCTION ensure_processed_events(days date[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
DECLARE
    wanted date;
    part   text;
BEGIN
    IF EXISTS (SELECT FROM unnest(days) AS day WHERE to_regclass(public.partition_of(day)) IS NULL) THEN
        -- Of two sinks that need the same day, the second waits here and then finds it. It looks into the catalog:
        -- to_regclass answers from the session's cache, where a day that was missing before the wait stays missing.
        PERFORM pg_advisory_xact_lock(hashtextextended('outbox: partitions of processed_events', 0));
        FOREACH wanted IN ARRAY days LOOP
            part := public.partition_of(wanted);
            CONTINUE WHEN EXISTS (
                SELECT FROM pg_class WHERE relnamespace = 'public'::regnamespace AND 'public.' || relname = part
            );
            IF public.first_uuid_of(wanted) < (SELECT horizon FROM public.dedup_horizon) THEN
                RAISE 'events of % are older than the deduplication horizon', wanted;
            END IF;
            EXECUTE format('CREATE TABLE %s (LIKE public.processed_events)', part);
            EXECUTE format('ALTER TABLE public.processed_events ATTACH PARTITION %s FOR VALUES FROM (%L) TO (%L)',
                           part, public.first_uuid_of(wanted), public.first_uuid_of(wanted + 1));
        END LOOP;
    END IF;
END $$;

-- Forgets the days before this one, wholly or not at all: raises the horizon to it, never lowers it, and drops the
-- partitions below. The last two days always stay. The caller holds the apply lock of every sink, so that nobody is
-- between reading the horizon and inserting, and has set a lock_timeout.
CREATE FUNCTION drop_processed_events(upto date)
RETURNS TABLE (name text, bound uuid, estimated_rows bigint, bytes bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
#variable_conflict use_column
DECLARE
    raised uuid;
    parts  text;
BEGIN
    IF upto > (now() AT TIME ZONE 'UTC')::date - 1 THEN
        RAISE 'today and yesterday are kept: % is too late a day', upto;
    END IF;
    PERFORM pg_advisory_xact_lock(hashtextextended('outbox: partitions of processed_events', 0));
    UPDATE public.dedup_horizon SET horizon = public.first_uuid_of(upto), raised_at = now()
     WHERE horizon < public.first_uuid_of(upto);
    SELECT horizon INTO STRICT raised FROM public.dedup_horizon;
    RETURN QUERY SELECT day.name, day.bound, day.estimated_rows, day.bytes
                   FROM public.processed_days AS day WHERE day.bound <= raised ORDER BY day.bound;
    SELECT string_agg(day.name, ', ' ORDER BY day.bound) INTO parts
      FROM public.processed_days AS day WHERE day.bound <= raised;
    IF parts IS NOT NULL THEN
        EXECUTE 'DROP TABLE ' || parts;
    END IF;
END $$;
"""

GRANTS = """
GRANT SELECT, INSERT, UPDATE ON sinks, positions, base_versions, dead_letters, key_versions TO {writer};
GRANT SELECT, INSERT ON checkpoint_generations, processed_events, landed_events, event_log, processed_changes TO
{writer}; GRANT SELECT ON dedup_horizon, processed_days TO {writer}, {pruner}, {auditor}; GRANT SELECT ON sinks,
positions, base_versions, dead_letters TO {auditor}, {pruner}; REVOKE ALL ON FUNCTION ensure_processed_events,
drop_processed_events FROM PUBLIC; GRANT EXECUTE ON FUNCTION ensure_processed_events TO {writer};
-- A sink cannot forget what it has applied.
GRANT EXECUTE ON FUNCTION drop_processed_events TO {pruner};
"""


def upgrade() -> None:
    for statements in (SINKS, STRATEGIES, RETENTION, GRANTS):
        execute(statements)


def downgrade() -> None:
    raise Failure(
        "the deduplication horizon is not dropped by a migration: a repeated older event would be applied twice",
        "restore a backup, or write a migration that goes forward",
    )
