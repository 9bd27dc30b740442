-- idea: store events under (topic, partition, offset); new is what was not there
-- survives: re-reads of the topic; not an event that is sent again, which has another offset
-- costs: the whole event, stored for good
-- choose: only for a topic that never repeats an event; shown because it is often taken for enough
WITH new AS (
    INSERT INTO event_log (sink, topic_id, partition, "offset", event)
    SELECT %(sink)s, %(topic_id)s, partition, "offset", to_jsonb(staged) FROM staged ORDER BY partition, "offset"
    ON CONFLICT DO NOTHING
    RETURNING partition, "offset"
)
INSERT INTO fresh
SELECT staged.* FROM staged JOIN new USING (partition, "offset");
