"""The partitions of processed_events, looked for where a wait for the lock cannot leave an old answer."""

from __future__ import annotations

from alembic import op

from outbox.errors import Failure

revision = "balances_machinery_0007"
down_revision = "balances_machinery_0006"
branch_labels = None
depends_on = None

UP = """
-- As before; but who has waited for the lock looks into the catalog. to_regclass answers from the session's cache, in
-- which a day that was missing before the wait is missing still, though the other sink has made it meanwhile.
CREATE OR REPLACE FUNCTION ensure_processed_events(days date[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
DECLARE
    wanted date;
    part   text;
BEGIN
    IF EXISTS (SELECT FROM unnest(days) AS day WHERE to_regclass(public.partition_of(day)) IS NULL) THEN
        PERFORM pg_advisory_xact_lock(hashtextextended('outbox: partitions of processed_events', 0));
        FOREACH wanted IN ARRAY days LOOP
            part := public.partition_of(wanted);
            CONTINUE WHEN EXISTS (
                SELECT FROM pg_class WHERE relnamespace = 'public'::regnamespace AND 'public.' || relname = part
            );
            IF public.first_uuid_of(wanted) < (SELECT floor FROM public.processed_floor) THEN
                RAISE 'events of % are below the retention floor', wanted;
            END IF;
            EXECUTE format('CREATE TABLE %s (LIKE public.processed_events)', part);
            EXECUTE format('ALTER TABLE public.processed_events ATTACH PARTITION %s FOR VALUES FROM (%L) TO (%L)',
                           part, public.first_uuid_of(wanted), public.first_uuid_of(wanted + 1));
        END LOOP;
    END IF;
END $$;
"""


def upgrade() -> None:
    op.execute(UP)


def downgrade() -> None:
    raise Failure("the function before had a fault", "stay here, or write a migration that goes forward")
