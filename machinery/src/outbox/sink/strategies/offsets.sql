-- idea: an offset at or above the position that this sink committed with its last batch is new
-- survives: re-reads of the topic; not an event that is resent, which has another offset
-- costs: nothing: the positions are kept anyway
-- choose: only for a topic that never repeats an event: no worker without exactly-once, no outbox sent a second time
-- knows: positions
-- repeats: re-reads
--
-- The position is read and moved in the transaction that applies, and it is where a sink without checkpoint begins.
INSERT INTO new_events
SELECT batch.*
  FROM batch
  LEFT JOIN positions ON positions.sink = %(sink)s AND positions.topic = %(topic)s
                     AND positions.partition = batch.partition
 WHERE batch."offset" >= coalesce(positions.next_offset, 0);
