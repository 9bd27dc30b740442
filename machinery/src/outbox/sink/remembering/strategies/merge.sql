-- idea: land events in a table keyed by event_id, by MERGE; an inserted event is new
-- survives: every duplicate: in a batch, across batches and restarts, resent under another offset
-- costs: the whole event, stored until retention deletes it below the deduplication horizon
-- choose: when the events are wanted in the database anyway, for queries, audits, or to compute results again
-- memory: landed_events by event_id
--
-- Events below the deduplication horizon may have been deleted, so they are set aside as by `dedup`.
INSERT INTO pg_temp.rejections (event_id, reason, detail)
SELECT DISTINCT batch.event_id, 'older than the deduplication horizon',
       format('ids below %%s are forgotten', (SELECT known.horizon FROM public.dedup_horizon AS known))
  FROM pg_temp.outbox_batch AS batch
 WHERE batch.event_id < (SELECT known.horizon FROM public.dedup_horizon AS known)
   AND NOT EXISTS (SELECT FROM public.landed_events AS known
                    WHERE known.sink = %(sink)s AND known.event_id = batch.event_id);

-- Two statements, because MERGE returns rows only since Postgres 17. Nobody else lands events of this sink in between: the
-- transaction has the sink's lock.
INSERT INTO pg_temp.new_events
SELECT DISTINCT ON (batch.event_id) batch.*
  FROM pg_temp.outbox_batch AS batch
  LEFT JOIN public.landed_events AS known ON known.sink = %(sink)s AND known.event_id = batch.event_id
 WHERE known.event_id IS NULL AND batch.event_id >= (SELECT horizon.horizon FROM public.dedup_horizon AS horizon)
 ORDER BY batch.event_id, batch.partition, batch."offset";

-- `to_jsonb(incoming.*)`: without the asterisk a property that is called incoming would be meant.
MERGE INTO public.landed_events AS known
USING pg_temp.new_events AS incoming ON known.sink = %(sink)s AND known.event_id = incoming.event_id
 WHEN NOT MATCHED THEN INSERT (sink, event_id, event) VALUES (%(sink)s, incoming.event_id, to_jsonb(incoming.*));
