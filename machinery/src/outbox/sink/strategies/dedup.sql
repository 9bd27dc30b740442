-- idea: remember each event_id in processed_events; an id that is not there is new
-- survives: every duplicate: in a batch, across batches and restarts, resent under another offset
-- costs: about 93 bytes per event until retention drops its day
-- choose: by default
--
-- Ids below the deduplication horizon are forgotten: nobody knows whether such an event was applied, so it is set aside.
INSERT INTO rejections (event_id, reason, detail)
SELECT DISTINCT event_id, 'older than the deduplication horizon',
       format('ids below %%s are forgotten', (SELECT horizon FROM dedup_horizon))
  FROM batch
 WHERE event_id < (SELECT horizon FROM dedup_horizon);

-- Ordered, so that two writers of the same ids wait for each other and do not deadlock.
WITH unseen AS (
    INSERT INTO processed_events (sink, event_id)
    SELECT DISTINCT %(sink)s, event_id
      FROM batch
     WHERE event_id >= (SELECT horizon FROM dedup_horizon)
     ORDER BY event_id
    ON CONFLICT DO NOTHING
    RETURNING event_id
)
INSERT INTO new_events
SELECT DISTINCT ON (event_id) batch.*
  FROM batch JOIN unseen USING (event_id)
 ORDER BY event_id, partition, "offset";
