-- idea: capture the rows of `accounts` as they change, not events; remember each change by (table, key, LSN, op)
-- survives: every duplicate, and lost changes too once a later one of the row arrives; a snapshot brings all rows
-- costs: a second slot, which retains the log while unread; a row per change until log and topic have dropped it
-- choose: when the service cannot write events, and its readers need the present state, not what happened
-- memory: processed_changes by table_name pk lsn op
--
-- The table becomes a contract: readers depend on its columns, so the service cannot rename one alone. A row has the
-- balance and not the transfer, so a reader who needs the reason must guess. An outbox contains what the service chose to
-- publish.
--
-- The key needs all four parts. The rows of a snapshot share one LSN, the place in the log where it was taken, and the
-- next change of one of them may begin right there. A changed primary key is a deletion and an insert at one LSN.
--
-- The LSN is no clock. A transaction that is open while a snapshot is taken may have written below the snapshot's LSN, and
-- its change is newer. The version says which of two states is newer: see projections/balances.sql.
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
