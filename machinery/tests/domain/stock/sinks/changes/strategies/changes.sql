-- idea: capture the rows of `items` as they change; remember each change by (table, key, LSN, op)
-- survives: every duplicate, and lost changes too once a later one of the row arrives
-- costs: a second slot; a row per change until log and topic have dropped it
-- choose: never; it is here so that the machinery is tested with a captured table
-- memory: processed_changes by table_name pk lsn op
WITH incoming AS (
    SELECT DISTINCT ON (batch.table_name, batch.{key}, batch.lsn, batch.op) batch.*
      FROM pg_temp.outbox_batch AS batch
     ORDER BY batch.table_name, batch.{key}, batch.lsn, batch.op, batch.partition, batch."offset"
), unseen AS (
    INSERT INTO public.processed_changes AS known (sink, table_name, pk, lsn, op)
    SELECT %(sink)s, incoming.table_name, incoming.{key}::text, incoming.lsn, incoming.op FROM incoming
    ON CONFLICT DO NOTHING
    RETURNING known.table_name, known.pk, known.lsn, known.op
)
INSERT INTO pg_temp.new_events
SELECT incoming.*
  FROM incoming
  JOIN unseen ON (unseen.table_name, unseen.lsn, unseen.op) = (incoming.table_name, incoming.lsn, incoming.op)
 WHERE unseen.pk = incoming.{key}::text;
