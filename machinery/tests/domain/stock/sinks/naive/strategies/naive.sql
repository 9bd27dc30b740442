-- idea: every event is new; total += quantity
-- survives: nothing: drifts by the sum of whatever is repeated
-- costs: nothing
-- choose: never; it is here to be watched drifting
-- memory: none
-- start: earliest
-- repeats: none
INSERT INTO pg_temp.new_events SELECT batch.* FROM pg_temp.outbox_batch AS batch;
