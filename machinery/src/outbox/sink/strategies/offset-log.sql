-- idea: store events under (topic, partition, offset); a place that is not there is new
-- survives: re-reads of the topic; not an event that is resent, which has another offset
-- costs: the whole event, stored until the topic has dropped its offset
-- choose: only for a topic that never repeats an event; shown because it is often taken for enough
-- repeats: re-reads
WITH unseen AS (
    INSERT INTO event_log (sink, topic_id, partition, "offset", event)
    SELECT %(sink)s, %(topic_id)s, partition, "offset", to_jsonb(batch) FROM batch ORDER BY partition, "offset"
    ON CONFLICT DO NOTHING
    RETURNING partition, "offset"
)
INSERT INTO new_events
SELECT batch.* FROM batch JOIN unseen USING (partition, "offset");
