-- idea: land events in a table keyed by event_id, by MERGE; an inserted event is new
-- survives: every duplicate: in a batch, across batches and restarts, resent under another offset
-- costs: the whole event, stored until retention deletes it below the deduplication horizon
-- choose: when the events are wanted in the database anyway, for queries, audits, or to compute results again
--
-- Events below the deduplication horizon may have been deleted, so they are set aside as by `dedup`.
INSERT INTO rejections (event_id, reason, detail)
SELECT DISTINCT event_id, 'older than the deduplication horizon',
       format('ids below %%s are forgotten', (SELECT horizon FROM dedup_horizon))
  FROM batch
 WHERE event_id < (SELECT horizon FROM dedup_horizon)
   AND NOT EXISTS (SELECT FROM landed_events AS known
                    WHERE known.sink = %(sink)s AND known.event_id = batch.event_id);

WITH landed AS (
    MERGE INTO landed_events AS known
    USING (SELECT DISTINCT ON (event_id) batch.*
             FROM batch
            WHERE event_id >= (SELECT horizon FROM dedup_horizon)
            ORDER BY event_id, partition, "offset") AS incoming
       ON known.sink = %(sink)s AND known.event_id = incoming.event_id
     WHEN NOT MATCHED THEN INSERT (sink, event_id, event) VALUES (%(sink)s, incoming.event_id, to_jsonb(incoming))
    RETURNING incoming.*
)
INSERT INTO new_events SELECT * FROM landed;
