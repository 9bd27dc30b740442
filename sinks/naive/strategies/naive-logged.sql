-- idea: every event is new, and how often it was applied is counted
-- survives: nothing: drifts by the sum of whatever is repeated
-- costs: a row per event
-- choose: never; with it the soak shows that the drift of `naive` is what was repeated
-- memory: none
-- start: earliest
-- repeats: none
INSERT INTO public.applied_events AS counted (sink, event_id, times)
SELECT %(sink)s, batch.event_id, count(*)
  FROM pg_temp.outbox_batch AS batch
 GROUP BY batch.event_id
 ORDER BY batch.event_id
ON CONFLICT (sink, event_id) DO UPDATE SET times = counted.times + excluded.times;
INSERT INTO pg_temp.new_events SELECT batch.* FROM pg_temp.outbox_batch AS batch;
