"""The tables of every sink beside its result: its driver, its positions, what it has applied, what it has set aside."""

from __future__ import annotations

from outbox.migrations.migrate import execute

revision = "sink_machinery_0001"
down_revision = None
branch_labels = ("machinery",)

SINKS = """
-- One row per sink. A driver adds one to the epoch when it starts; a driver that finds another epoch is superseded.
-- The counts are of all time. They change with the positions, in the last transaction of a batch. What a batch has
-- applied before that, in a lakehouse's table or by one of several workers of a handler, counts as duplicates when the
-- process ends in between and the batch comes again. Other sinks have one transaction, so no crash makes theirs wrong.
CREATE TABLE sinks (
    name       text   PRIMARY KEY,
    epoch      bigint NOT NULL,
    generation int    NOT NULL DEFAULT 0, -- of its checkpoint
    applied    bigint NOT NULL DEFAULT 0,
    duplicates bigint NOT NULL DEFAULT 0,
    skipped    bigint NOT NULL DEFAULT 0, -- events that it had not asked for
    filtered   bigint NOT NULL DEFAULT 0, -- events that its transform left out
    asked_for  jsonb,                     -- its strategy, topics and events (outbox/sink/remembering/asked.py)
    -- By topic and partition the offset up to which a handler may have begun to call its function, without an end; and
    -- how often in a row a start has found such calls.
    unfinished    jsonb NOT NULL DEFAULT '{}',
    interruptions int   NOT NULL DEFAULT 0
);

-- How far each sink has applied each partition, written in the transaction that applies. topic_id distinguishes a
-- recreated topic from the one that was read.
CREATE TABLE positions (
    sink         text    NOT NULL,
    topic        text    NOT NULL,
    partition    int     NOT NULL,
    topic_id     text    NOT NULL,
    next_offset  bigint  NOT NULL,
    based        bigint  NOT NULL DEFAULT 0,     -- where it stood when its state was taken from the source
    is_recreated boolean NOT NULL DEFAULT false, -- the sink has applied events of an earlier topic of this name too
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
-- duplicates, whatever the strategy knows of them. So are those that the sink had passed by then (positions.based): the
-- source has them or, restored from a backup, has forgotten them. The version of a key that it does not have is 0. Keys
-- of different topics are different keys.
CREATE TABLE base_versions (
    sink    text   NOT NULL,
    topic   text   NOT NULL,
    key     text   NOT NULL,
    version bigint NOT NULL,
    PRIMARY KEY (sink, topic, key)
);

-- Events that a sink has passed because it had not asked for them; `*` stands for those that were not declared.
CREATE TABLE skipped_events (
    sink  text NOT NULL,
    topic text NOT NULL,
    event text NOT NULL,
    PRIMARY KEY (sink, topic, event)
);

-- Records that could not be applied, as they came. identity is the event's id, or a hash of key, headers and value if
-- it has none: a repeated event finds itself here and only moves last_seen_at.
CREATE TABLE dead_letters (
    sink          text        NOT NULL,
    identity      text        NOT NULL,
    topic         text        NOT NULL,
    topic_id      text        NOT NULL,
    partition     int         NOT NULL,
    "offset"      bigint      NOT NULL,
    key           bytea,
    -- [{"key": …, "value": …}], in order; bytes that are no text as key_base64, value_base64
    headers       jsonb       NOT NULL DEFAULT '[]',
    value         bytea,
    event_id      uuid,
    is_event      boolean     NOT NULL DEFAULT false, -- valid: strategy, projection or transform have refused it
    version       bigint,      -- of a valid event whose key numbers its events
    reason        text        NOT NULL,
    detail        text        NOT NULL,
    -- replayed: the sink has dealt with the event since; discarded: it is never applied.
    status        text        NOT NULL DEFAULT 'open' CHECK (status IN ('open', 'replayed', 'discarded')),
    -- why it was discarded, or a record with its id before; `filtered` if it was replayed and the transform left it out
    resolution    text,
    recorded_at   timestamptz NOT NULL DEFAULT now(), -- the record's timestamp
    first_seen_at timestamptz NOT NULL DEFAULT now(),
    last_seen_at  timestamptz NOT NULL DEFAULT now(),
    retries       int         NOT NULL DEFAULT 0, -- calls of a handler again for the event, counted before each
    PRIMARY KEY (sink, identity)
);
CREATE INDEX dead_letters_open ON dead_letters (sink, first_seen_at) WHERE status = 'open';
CREATE INDEX dead_letters_resolved ON dead_letters (sink, last_seen_at) WHERE status <> 'open';
-- By a hash, because a foreign record may have a key that is too long for an index. The status is in the expression and
-- no condition of the index: a query with that condition could use the other index of open letters, and read them all.
CREATE INDEX dead_letters_of_key ON dead_letters ((CASE WHEN status = 'open' THEN sha256(key) END));
"""

STRATEGIES = """
-- Strategy `dedup`: the ids a sink has applied, in partitions by the time inside the UUIDv7: one per day or, for old
-- ids, per month. Inserts stay in a small, warm index however long the history grows; retention drops whole partitions.
-- The id comes first, because it decides most comparisons in the index and the name of the sink hardly any.
CREATE TABLE processed_events (
    sink     text NOT NULL,
    event_id uuid NOT NULL,
    PRIMARY KEY (event_id, sink)
) PARTITION BY RANGE (event_id);

-- Strategy `upsert`: the highest version of each key that was applied.
CREATE TABLE key_versions (
    sink    text   NOT NULL,
    topic   text   NOT NULL,
    key     text   NOT NULL,
    version bigint NOT NULL,
    PRIMARY KEY (sink, topic, key)
) WITH (fillfactor = 70);

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

-- Strategy `merge`: events by their id.
CREATE TABLE landed_events (
    sink     text  NOT NULL,
    event_id uuid  NOT NULL,
    event    jsonb NOT NULL, -- the columns of the batch
    PRIMARY KEY (sink, event_id)
);

-- Strategy `changes`: changes of captured tables. All rows of a snapshot share an LSN, so the LSN alone is no key. It
-- comes first because it grows: inserts stay in a small, warm part of the index, and retention deletes by it.
CREATE TABLE processed_changes (
    sink       text   NOT NULL,
    table_name text   NOT NULL,
    pk         text   NOT NULL,
    lsn        bigint NOT NULL,
    op         text   NOT NULL,
    PRIMARY KEY (sink, lsn, table_name, pk, op)
);
"""

ERASED_KEYS = """
-- The keys whose data `outbox erase` has removed: nothing may bring them back. A hash stands for the key. Sinks leave
-- out its events up to `until`, and rebuilds from the source its state up to `version`. What the service writes of the
-- key afterwards is applied.
CREATE TABLE erased_keys (
    topic     text        NOT NULL,
    key_hash  bytea       NOT NULL, -- sha256 of the record's key
    until     uuid        NOT NULL, -- the highest id of an event from before
    version   bigint,               -- the highest version that the source knew, if any
    erased_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (topic, key_hash)
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

-- The lowest UUID with a time on this day, and the day (UTC) of the time inside a UUID.
CREATE FUNCTION first_uuid_of(day date) RETURNS uuid
LANGUAGE sql IMMUTABLE STRICT
RETURN rpad(lpad(to_hex((extract(epoch FROM day) * 1000)::bigint), 12, '0'), 32, '0')::uuid;

CREATE FUNCTION day_of(id uuid) RETURNS date
LANGUAGE sql IMMUTABLE STRICT
RETURN date '1970-01-01' + (('x' || left(replace(id::text, '-', ''), 12))::bit(48)::bigint / 86400000)::int;

-- The partitions of processed_events, with the days that each covers; its ids are below its bound. Days and bound come
-- from the catalog, so they are true of every partition, however it was made. Rows are as of the last ANALYZE, if any.
-- The size is left to the reader: to look it up takes longer than all the rest.
CREATE VIEW processed_partitions AS
    SELECT name, daterange(day_of(bounds[1]::uuid), day_of(bounds[2]::uuid)) AS days, bounds[2]::uuid AS bound,
           estimated_rows
      FROM (SELECT part.oid::regclass AS name,
                   regexp_match(pg_get_expr(part.relpartbound, part.oid),
                                $$FROM \\('([0-9a-f-]+)'\\) TO \\('([0-9a-f-]+)'\\)$$) AS bounds,
                   nullif(part.reltuples, -1)::bigint AS estimated_rows
              FROM pg_inherits JOIN pg_class AS part ON part.oid = inhrelid
             WHERE inhparent = 'public.processed_events'::regclass) AS part;

-- The partitions that events of these days need and that do not exist, as ranges of days. A day near today gets its own
-- partition. Any other day gets one for the gap of its month that it is in, mostly the whole month: so ids of fifty
-- years need some 700 partitions. Days below the horizon need none.
CREATE FUNCTION missing_partitions(days date[]) RETURNS SETOF daterange
LANGUAGE sql STABLE
BEGIN ATOMIC
    WITH covered AS (
        SELECT coalesce(range_agg(part.days), '{}') AS days FROM processed_partitions AS part
    ), missing AS (
        SELECT day, (now() AT TIME ZONE 'UTC')::date AS today, covered.days AS covered,
               daterange(first_of_month, (first_of_month + interval '1 month')::date) AS month
          FROM unnest(days) AS day, CAST(date_trunc('month', day) AS date) AS first_of_month, covered
         WHERE NOT day <@ covered.days AND day >= day_of((SELECT horizon FROM dedup_horizon))
    )
    SELECT DISTINCT daterange(day, day + 1)
      FROM missing
     WHERE upper(month) >= today - 62 AND day <= today + 62
     UNION
    SELECT DISTINCT gap
      FROM missing, unnest(datemultirange(month) - covered) AS gap
     WHERE NOT (upper(month) >= today - 62 AND day <= today + 62) AND day <@ gap
     ORDER BY 1;
END;

-- Makes partitions of processed_events that events of these days need. It makes at most 50, because each holds locks
-- until the caller's transaction ends, and returns whether none is missing now; if not, call it again in the next
-- transaction. It runs as its owner because a sink may not make tables. ATTACH lets other sinks read and insert
-- meanwhile; PARTITION OF would not.
CREATE FUNCTION ensure_processed_events(days date[]) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
DECLARE
    wanted daterange;
    part   text;
BEGIN
    -- Of two sinks that need the same day, the second waits here and then finds it. It waits for the end of the first
    -- one's commit: a little earlier the partition is visible already, but other sessions do not yet insert into it.
    PERFORM pg_advisory_xact_lock(hashtextextended('outbox: partitions of processed_events', 0));
    FOR wanted IN SELECT range FROM public.missing_partitions(days) AS range LIMIT 50 LOOP
        part := 'public.processed_events_' || to_char(lower(wanted), 'YYYYMMDD');
        IF upper(wanted) - lower(wanted) > 1 THEN
            part := part || '_' || to_char(upper(wanted) - 1, 'YYYYMMDD');
        END IF;
        EXECUTE format('CREATE TABLE %s (LIKE public.processed_events)', part);
        EXECUTE format('ALTER TABLE public.processed_events ATTACH PARTITION %s FOR VALUES FROM (%L) TO (%L)',
                       part, public.first_uuid_of(lower(wanted)), public.first_uuid_of(upper(wanted)));
    END LOOP;
    RETURN NOT EXISTS (SELECT FROM public.missing_partitions(days));
END $$;

-- Forgets the ids of the days before this one: raises the horizon to it, never lowers it, and drops the partitions that
-- are wholly below, the lowest 50 of them. Call it until it returns none: the others are below the horizon too, so no
-- sink needs them. Today and yesterday always stay. The caller holds the apply lock of every sink, so that no sink is
-- between reading the horizon and inserting, and has set a lock_timeout.
CREATE FUNCTION drop_processed_events(upto date)
RETURNS TABLE (name text, days daterange, estimated_rows bigint, bytes bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
#variable_conflict use_column
DECLARE
    raised uuid;
    parts  regclass[];
BEGIN
    IF upto > (now() AT TIME ZONE 'UTC')::date - 1 THEN
        RAISE 'today and yesterday are kept: % is too late a day', upto;
    END IF;
    PERFORM pg_advisory_xact_lock(hashtextextended('outbox: partitions of processed_events', 0));
    UPDATE public.dedup_horizon SET horizon = public.first_uuid_of(upto), raised_at = now()
     WHERE horizon < public.first_uuid_of(upto);
    SELECT horizon INTO STRICT raised FROM public.dedup_horizon;
    SELECT array_agg(part.name ORDER BY part.bound) INTO parts
      FROM (SELECT part.name, part.bound FROM public.processed_partitions AS part
             WHERE part.bound <= raised ORDER BY part.bound LIMIT 50) AS part;
    IF parts IS NOT NULL THEN
        RETURN QUERY SELECT part.name::text, part.days, part.estimated_rows, pg_total_relation_size(part.name)
                       FROM public.processed_partitions AS part WHERE part.name = ANY (parts) ORDER BY part.bound;
        EXECUTE 'DROP TABLE ' || array_to_string(parts, ', ');
    END IF;
END $$;
"""

# Postgres lets everybody call a new function.
REVOKE = "REVOKE ALL ON FUNCTION public.ensure_processed_events, public.drop_processed_events FROM PUBLIC"


def upgrade() -> None:
    for statements in (SINKS, STRATEGIES, ERASED_KEYS, RETENTION, REVOKE):
        execute(statements)
