-- idea: remember each event_id in processed_events; new is what was not there
-- survives: every duplicate: in a batch, across batches and restarts, sent again under another offset
-- costs: about 84 bytes an event until retention drops its day
-- choose: by default
--
-- Below the floor ids are forgotten: whether such an event was applied, nobody can tell, so it is set aside.
WITH forgotten AS (
    DELETE FROM staged WHERE event_id < (SELECT horizon FROM dedup_horizon) RETURNING event_id
)
INSERT INTO rejected (event_id, reason, detail)
SELECT event_id, 'below the retention floor', format('ids below %%s are forgotten', horizon)
  FROM forgotten, dedup_horizon;

SELECT ensure_processed_events(array_agg(DISTINCT (uuid_extract_timestamp(event_id) AT TIME ZONE 'UTC')::date))
  FROM staged;

-- Ordered, so that two writers of the same ids wait for each other and do not deadlock.
WITH new AS (
    INSERT INTO processed_events (sink, event_id)
    SELECT DISTINCT %(sink)s, event_id FROM staged ORDER BY event_id
    ON CONFLICT DO NOTHING
    RETURNING event_id
)
INSERT INTO fresh
SELECT DISTINCT ON (event_id) staged.*
  FROM staged JOIN new USING (event_id)
 ORDER BY event_id, partition, "offset";
