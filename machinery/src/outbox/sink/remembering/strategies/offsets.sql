-- idea: an offset at or above the position that this sink committed with its last batch is new
-- survives: re-reads of the topic; not an event that is resent, which has another offset
-- costs: nothing: the positions are kept anyway
-- choose: only for a topic that never repeats an event: no worker without exactly-once, no outbox sent a second time
-- memory: none
-- knows: positions
-- repeats: re-reads
--
-- The position is read and moved in the transaction that applies, and it is where a sink without checkpoint begins.
INSERT INTO pg_temp.new_events
SELECT batch.*
  FROM pg_temp.outbox_batch AS batch
  LEFT JOIN public.positions AS reached
    ON reached.sink = %(sink)s AND reached.topic = %(topic)s AND reached.partition = batch.partition
 WHERE batch."offset" >= coalesce(reached.next_offset, 0);
