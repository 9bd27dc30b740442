-- idea: no events but the rows of `accounts` as they change, read from the log; remember each by (table, key, LSN, op)
-- survives: every duplicate, and lost changes too, once a later one of the row comes; a snapshot brings all rows anew
-- costs: a slot of its own, which holds the log back while nobody reads it; some 270 bytes a change, kept for good
-- choose: when the service cannot be changed to write events, and its readers want to know what is, not what happened
--
-- What else it changes: the table becomes a contract. Its readers depend on its columns, which the service cannot rename
-- by itself any more, and they see all of them. And there is no intent: a row tells the balance and not the transfer, so
-- who wants to know why has to guess. An outbox tells what its service chose to tell.
--
-- Why all four: the rows of a snapshot share one LSN, that at which it was taken, and the next change of one of them may
-- begin right there; a primary key that changes is a deletion and an insert at one LSN. Why the LSN is no clock: what a
-- transaction writes that is open while a snapshot is taken stands below the snapshot's LSN, and is newer. Which of two
-- states is newer, the version tells: see projections/balances.sql.
WITH incoming AS (
    SELECT DISTINCT ON (table_name, account_id, lsn, op) *
      FROM batch
     ORDER BY table_name, account_id, lsn, op, partition, "offset"
), unseen AS (
    INSERT INTO processed_changes (sink, table_name, pk, lsn, op)
    SELECT %(sink)s, table_name, account_id::text, lsn, op FROM incoming
    ON CONFLICT DO NOTHING
    RETURNING table_name, pk, lsn, op
)
INSERT INTO new_events
SELECT incoming.*
  FROM incoming JOIN unseen USING (table_name, lsn, op)
 WHERE unseen.pk = incoming.account_id::text;
