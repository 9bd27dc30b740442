-- idea: land events in a table keyed by event_id, by MERGE; new is what was inserted
-- survives: every duplicate: in a batch, across batches and restarts, sent again under another offset
-- costs: the whole event, stored for good
-- choose: when the events are wanted in the database anyway, for queries, audits, or to compute balances anew
WITH landed AS (
    MERGE INTO landed_events AS known
    USING (SELECT DISTINCT ON (event_id) * FROM staged ORDER BY event_id, partition, "offset") AS came
       ON known.sink = %(sink)s AND known.event_id = came.event_id
     WHEN NOT MATCHED THEN INSERT (sink, event_id, event) VALUES (%(sink)s, came.event_id, to_jsonb(came))
    RETURNING known.event_id
)
INSERT INTO fresh
SELECT DISTINCT ON (event_id) staged.*
  FROM staged JOIN landed USING (event_id)
 ORDER BY event_id, partition, "offset";
