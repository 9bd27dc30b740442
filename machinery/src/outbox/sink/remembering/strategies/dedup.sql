-- idea: remember each event_id in processed_events; an id that is not there is new
-- survives: every duplicate: in a batch, across batches and restarts, resent under another offset
-- costs: about 93 bytes per event until retention drops its day
-- choose: by default
-- memory: processed_events by event_id
--
-- Ids below the deduplication horizon are forgotten: nobody knows whether such an event was applied, so it is set aside.
INSERT INTO pg_temp.rejections (event_id, reason, detail)
SELECT DISTINCT batch.event_id, 'older than the deduplication horizon',
       format('ids below %%s are forgotten', (SELECT known.horizon FROM public.dedup_horizon AS known))
  FROM pg_temp.outbox_batch AS batch
 WHERE batch.event_id < (SELECT known.horizon FROM public.dedup_horizon AS known);

-- Ordered, so that two writers of the same ids wait for each other and do not deadlock.
WITH unseen AS (
    INSERT INTO public.processed_events AS known (sink, event_id)
    SELECT DISTINCT %(sink)s, batch.event_id
      FROM pg_temp.outbox_batch AS batch
     WHERE batch.event_id >= (SELECT horizon.horizon FROM public.dedup_horizon AS horizon)
     ORDER BY batch.event_id
    ON CONFLICT DO NOTHING
    RETURNING known.event_id
)
INSERT INTO pg_temp.new_events
SELECT DISTINCT ON (batch.event_id) batch.*
  FROM pg_temp.outbox_batch AS batch JOIN unseen ON unseen.event_id = batch.event_id
 ORDER BY batch.event_id, batch.partition, batch."offset";
