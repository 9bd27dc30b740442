-- idea: store each event under (topic, partition, offset); a place that is not there is new
-- survives: re-reads of the topic; not an event that is resent, which has another offset
-- costs: the whole event, stored until the topic has dropped its offset
-- choose: only for a topic that never repeats an event; `offsets` recognises the same and stores nothing
-- memory: event_log by topic_id partition offset
-- repeats: re-reads
--
-- By the topic's id, because a topic that is deleted and created again begins at offset 0 again.
WITH unseen AS (
    INSERT INTO public.event_log AS known (sink, topic_id, partition, "offset", event)
    SELECT %(sink)s, %(topic_id)s, batch.partition, batch."offset", to_jsonb(batch.*)
      FROM pg_temp.outbox_batch AS batch
     ORDER BY batch.partition, batch."offset"
    ON CONFLICT DO NOTHING
    RETURNING known.partition, known."offset"
)
INSERT INTO pg_temp.new_events
SELECT batch.*
  FROM pg_temp.outbox_batch AS batch
  JOIN unseen ON unseen.partition = batch.partition AND unseen."offset" = batch."offset";
