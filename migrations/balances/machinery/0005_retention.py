"""Retention of processed_events: the floor, and the only way to raise it."""

from __future__ import annotations

from alembic import op

from outbox.errors import Failure

revision = "balances_machinery_0005"
down_revision = "balances_machinery_0004"
branch_labels = None
depends_on = None

UP = """
-- Below the floor nothing is remembered of what was applied; so what comes from below it is not applied, but set aside.
CREATE TABLE processed_floor (
    floor     uuid        NOT NULL,
    raised_at timestamptz NOT NULL DEFAULT now(),
    one       boolean     NOT NULL DEFAULT true PRIMARY KEY CHECK (one) -- one row
);
INSERT INTO processed_floor (floor) VALUES ('00000000-0000-0000-0000-000000000000');

-- The days of processed_events: an event of each has an id below its bound. Rows are as of the last analyze, if any.
CREATE VIEW processed_days AS
    SELECT part.oid::regclass::text AS name,
           substring(pg_get_expr(part.relpartbound, part.oid) FROM $$TO \\('([0-9a-f-]+)'\\)$$)::uuid AS bound,
           nullif(part.reltuples, -1)::bigint AS estimated_rows,
           pg_total_relation_size(part.oid) AS bytes
      FROM pg_inherits JOIN pg_class AS part ON part.oid = inhrelid
     WHERE inhparent = 'public.processed_events'::regclass;

-- Forgets the days before this one, wholly or not at all: raises the floor to it, never lowers it, and drops what lies
-- below. The last two days stay whatever is asked for. The caller holds the apply lock of every sink, as nobody may be
-- between looking at the floor and inserting, and has set a lock_timeout.
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
    UPDATE public.processed_floor SET floor = public.first_uuid_of(upto), raised_at = now()
     WHERE floor < public.first_uuid_of(upto);
    SELECT floor INTO STRICT raised FROM public.processed_floor;
    RETURN QUERY SELECT day.name, day.bound, day.estimated_rows, day.bytes
                   FROM public.processed_days AS day WHERE day.bound <= raised ORDER BY day.bound;
    SELECT string_agg(day.name, ', ' ORDER BY day.bound) INTO parts
      FROM public.processed_days AS day WHERE day.bound <= raised;
    IF parts IS NOT NULL THEN
        EXECUTE 'DROP TABLE ' || parts;
    END IF;
END $$;

-- As before, and never a day below the floor: what is inserted there would be taken for all there ever was.
CREATE OR REPLACE FUNCTION ensure_processed_events(days date[]) RETURNS void
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
            IF public.first_uuid_of(wanted) < (SELECT floor FROM public.processed_floor) THEN
                RAISE 'events of % are below the retention floor', wanted;
            END IF;
            EXECUTE format('CREATE TABLE %s (LIKE public.processed_events)', part);
            EXECUTE format('ALTER TABLE public.processed_events ATTACH PARTITION %s FOR VALUES FROM (%L) TO (%L)',
                           part, public.first_uuid_of(wanted), public.first_uuid_of(wanted + 1));
        END LOOP;
    END IF;
END $$;

GRANT SELECT ON processed_floor, processed_days TO balances_sink, balances_auditor;
REVOKE ALL ON FUNCTION drop_processed_events FROM PUBLIC;
GRANT EXECUTE ON FUNCTION drop_processed_events TO balances_sink;
"""


def upgrade() -> None:
    op.execute(UP)


def downgrade() -> None:
    raise Failure(
        "the floor of processed_events is not dropped by a migration: what comes again from below it would be applied "
        "twice",
        "restore a backup, or write a migration that goes forward",
    )
