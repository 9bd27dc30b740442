-- idea: capture the rows of `items` as they change; remember each change by (table, key, LSN, op)
-- survives: every duplicate, and lost changes too once a later one of the row arrives
-- costs: a second slot; a row per change until log and topic have dropped it
-- choose: never; it is here so that the machinery is tested with a captured table
WITH incoming AS (
    SELECT DISTINCT ON (table_name, {key}, lsn, op) *
      FROM batch
     ORDER BY table_name, {key}, lsn, op, partition, "offset"
), unseen AS (
    INSERT INTO processed_changes (sink, table_name, pk, lsn, op)
    SELECT %(sink)s, table_name, {key}::text, lsn, op FROM incoming
    ON CONFLICT DO NOTHING
    RETURNING table_name, pk, lsn, op
)
INSERT INTO new_events
SELECT incoming.*
  FROM incoming JOIN unseen USING (table_name, lsn, op)
 WHERE unseen.pk = incoming.{key}::text;
